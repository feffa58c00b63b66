from itertools import pairwise
from statistics import mean

import pytest

from bench.peers import workloads

VOCAB = 1000


def test_every_round_has_its_own_prompts_and_the_same_round_the_same():
    first, again, second = (workloads.decode_prompts(4, VOCAB, 0, round_) for round_ in (1, 1, 2))
    assert first == again
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_w1_keeps_its_shape_and_changes_its_prompts_between_rounds():
    first, second = (workloads.w1_requests(VOCAB, 0, round_) for round_ in (1, 2))
    assert len(first) == len(second) == 64
    assert {each.arrival for each in first} == {0.0}
    assert not {each.prompt_token_ids for each in first} & {each.prompt_token_ids for each in second}


def test_poisson_requests_come_in_order_within_the_time_and_begin_at_once():
    requests = workloads.poisson_requests(5.0, 10.0, VOCAB, 0, 1)
    arrivals = [each.arrival for each in requests]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 10.0


@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_poisson_requests_come_at_their_rate_with_gaps_that_vary_like_exponential_ones(rate):
    arrivals = [each.arrival for each in workloads.poisson_requests(rate, 2000 / rate, VOCAB, 0, 1)]
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert len(arrivals) == pytest.approx(2000, rel=0.1)
    assert mean(gap**2 for gap in gaps) / mean(gaps) ** 2 == pytest.approx(2, rel=0.15)


def test_poisson_requests_differ_between_rounds_and_rates():
    three = [
        workloads.poisson_requests(rate, 5.0, VOCAB, 0, round_)[0].prompt_token_ids
        for rate, round_ in ((2.0, 1), (2.0, 2), (3.0, 1))
    ]
    assert len(set(three)) == 3


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_rate_or_time_of_nothing_is_refused(rate, seconds):
    with pytest.raises(ValueError, match="above 0"):
        workloads.poisson_requests(rate, seconds, VOCAB, 0, 1)


def test_shared_prefix_requests_share_512_tokens_and_nothing_more():
    requests = workloads.shared_prefix_requests(VOCAB, 0, 1)
    prompts = [each.prompt_token_ids for each in requests]
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[512:] for prompt in prompts}) == len(prompts) == 16
    assert {len(prompt) for prompt in prompts} == {544}


def test_the_shared_prefix_is_another_one_in_the_next_round():
    first, second = (workloads.shared_prefix_requests(VOCAB, 0, round_)[0].prompt_token_ids for round_ in (1, 2))
    assert first[:512] != second[:512]
