from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean, stdev

import pytest

from millpond.errors import ConfigError
from millpond.lab.arrivals import Traffic, with_random_prompts
from millpond.lab.lengths import Lengths


def traffic(**changes):
    settings = {
        "num_requests": 2000,
        "rate": 4.0,
        "prompt_tokens": Lengths(range(3, 10), drawn=True),
        "max_tokens": Lengths((1, 2)),
    }
    return Traffic(**{**settings, **changes})


def gaps(requests):
    return [later.arrival - earlier.arrival for earlier, later in pairwise(requests)]


def test_the_same_seed_gives_the_same_requests_and_another_gives_others():
    assert traffic().requests() == traffic().requests()
    assert traffic().requests() != traffic(seed=1).requests()


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_of_the_rate_and_the_burstiness_as_their_variation(burstiness):
    found = gaps(traffic(num_requests=20_000, burstiness=burstiness).requests())
    assert mean(found) == pytest.approx(0.25, rel=0.1)
    assert stdev(found) / mean(found) == pytest.approx(burstiness, rel=0.1)


def test_without_burstiness_requests_come_like_a_metronome():
    assert gaps(traffic(num_requests=5, burstiness=0.0).requests()) == [0.25] * 4


def test_an_infinite_rate_is_all_at_once():
    assert {each.arrival for each in traffic(rate=math.inf).requests()} == {0.0}


def test_the_lengths_are_the_same_at_every_rate():
    slow, fast, at_once = (traffic(rate=rate).requests() for rate in (1.0, 8.0, math.inf))
    lengths = [[len(each.prompt_token_ids) for each in requests] for requests in (slow, fast, at_once)]
    assert lengths[0] == lengths[1] == lengths[2]
    assert [each.arrival for each in slow] == pytest.approx([8 * each.arrival for each in fast])


def test_prompts_and_outputs_have_their_lengths():
    found = traffic(num_requests=100).requests()
    assert {len(each.prompt_token_ids) for each in found} == set(range(3, 10))
    assert [each.max_tokens for each in found] == [1, 2] * 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 0}, r"\(--requests\) must be at least 1, got 0"),
        ({"rate": 0.0}, r"rate \(--rate\) must be above 0 requests a second, got 0"),
        ({"rate": math.nan}, "got nan"),
        ({"rate": 1e-300}, r"2000 requests \(--requests\) take 2e\+303 seconds to come at 1e-300 a second \(--rate\)"),
        ({"burstiness": -1.0}, r"\(--burstiness\) must be 0, or from 0.01 to 100, got -1"),
        ({"burstiness": 1e-200}, "got 1e-200"),
        ({"burstiness": math.inf}, "got inf"),
        ({"burstiness": math.nan}, "got nan"),
    ],
)
def test_traffic_that_cannot_be_is_refused_by_the_name_of_its_option(changes, message):
    with pytest.raises(ConfigError, match=message):
        traffic(**changes)


@pytest.mark.parametrize("burstiness", [0.01, 100.0])
def test_the_extremes_of_burstiness_still_give_arrivals_in_order(burstiness):
    found = [each.arrival for each in traffic(burstiness=burstiness).requests()]
    assert found == sorted(found)
    assert math.isfinite(found[-1])


def test_more_requests_or_tokens_than_memory_is_meant_for_are_refused_before_they_are_made():
    with pytest.raises(ConfigError, match=r"at most 1000000 requests, got 1000000000000.*\(--requests\)"):
        traffic(num_requests=10**12, rate=math.inf).requests()
    with pytest.raises(ConfigError, match=r"at most 67108864 tokens, got \d+ in 2000 requests.*\(--prompt-tokens"):
        traffic(max_tokens=Lengths((50_000,))).requests()


def test_random_prompts_keep_everything_but_the_tokens():
    workload = traffic(num_requests=50).requests()
    found = with_random_prompts(workload, 10, seed=0)
    assert [(each.arrival, len(each.prompt_token_ids), each.max_tokens) for each in found] == [
        (each.arrival, len(each.prompt_token_ids), each.max_tokens) for each in workload
    ]
    assert {token for each in found for token in each.prompt_token_ids} == set(range(10))
