from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from statistics import mean, median, stdev

import pytest

from millpond.errors import ConfigError
from millpond.lab.arrivals import LengthDistribution, Traffic, parse_lengths, with_random_prompts


def traffic(**changes):
    settings = {
        "num_requests": 2000,
        "rate": 4.0,
        "prompt_tokens": LengthDistribution(3, 9),
        "output_tokens": LengthDistribution(1, 1),
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
    slow, fast = traffic(rate=1.0).requests(), traffic(rate=8.0).requests()
    assert [len(each.prompt_token_ids) for each in slow] == [len(each.prompt_token_ids) for each in fast]
    assert [each.arrival for each in slow] == pytest.approx([8 * each.arrival for each in fast])


def test_even_lengths_take_every_value_from_end_to_end():
    assert {len(each.prompt_token_ids) for each in traffic().requests()} == set(range(3, 10))


def test_lognormal_lengths_lie_around_their_median_and_stop_at_the_most():
    found = [parse_lengths("lognormal:100:0.8:300", "x").draw(random) for random in map(Random, range(2000))]
    assert median(found) == pytest.approx(100, rel=0.1)
    assert max(found) == 300
    assert sum(each == 300 for each in found) > 50


@pytest.mark.parametrize(("text", "ends"), [("7", (7, 7)), ("32-256", (32, 256)), (" 1-1 ", (1, 1))])
def test_lengths_are_one_number_or_two(text, ends):
    assert parse_lengths(text, "x") == LengthDistribution(*ends)


@pytest.mark.parametrize("text", ["", "0", "5-4", "a", "1-2-3", "lognormal:9:1", "lognormal:0:1:5", "lognormal:9:1:5"])
def test_other_lengths_are_refused_by_the_name_of_the_option(text):
    with pytest.raises(ConfigError, match=rf"--prompt-tokens .*got '{text}'"):
        parse_lengths(text, "--prompt-tokens")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 0}, "at least 1, got 0"),
        ({"rate": 0.0}, "rate must be above 0 requests a second, got 0"),
        ({"rate": math.nan}, "got nan"),
        ({"burstiness": -1.0}, "burstiness must be 0 or more, got -1"),
        ({"burstiness": math.inf}, "got inf"),
    ],
)
def test_traffic_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        traffic(**changes)


def test_random_prompts_keep_everything_but_the_tokens():
    workload = traffic(num_requests=50).requests()
    found = with_random_prompts(workload, 10, seed=0)
    assert [(each.arrival, len(each.prompt_token_ids), each.max_tokens) for each in found] == [
        (each.arrival, len(each.prompt_token_ids), each.max_tokens) for each in workload
    ]
    assert {token for each in found for token in each.prompt_token_ids} == set(range(10))
