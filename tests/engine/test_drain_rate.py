from __future__ import annotations

import pytest

from millpond.engine.drain_rate import MOST_SECONDS, WINDOW_SECONDS, DrainRate


def rate_of(*finished, began=0.0):
    rate = DrainRate()
    rate.begin(began)
    for each in finished:
        rate.finish(*each)
    return rate


def test_requests_take_as_long_as_those_that_finished():
    rate = rate_of(*[(second, 100, 50) for second in (1.0, 2.0, 3.0, 4.0)])
    assert [rate.seconds_until(4.0, count, 0) for count in (1, 2, 7)] == [1, 2, 7]


def test_the_speed_is_in_tokens_of_prompts_and_outputs():
    slow, fast = rate_of((2.0, 10, 990)), rate_of((2.0, 10, 990), (2.0, 10, 2990))
    assert slow.seconds_until(2.0, 4, 0) == 8
    assert fast.seconds_until(2.0, 4, 0) == 4


def test_prompt_tokens_take_their_share_of_outputs_with_them():
    rate = rate_of((1.0, 100, 300), (2.0, 100, 300))
    assert rate.seconds_until(2.0, 0, 1000) == 10
    assert rate.seconds_until(2.0, 12, 1000) == 12


def test_what_finished_before_the_window_is_forgotten():
    rate = rate_of(*[(0.001 * count, 10, 10) for count in range(1000)], (WINDOW_SECONDS + 10.0, 10, 10))
    assert rate.seconds_until(WINDOW_SECONDS + 10.0, 1, 0) == WINDOW_SECONDS


def test_where_nothing_has_finished_it_takes_at_least_as_long_as_that():
    rate = rate_of(began=50.0)
    assert [rate.seconds_until(now, 5, 0) for now in (50.0, 57.5, 5000.0)] == [1, 8, WINDOW_SECONDS]


def test_idle_time_is_not_counted():
    rate = rate_of((1.0, 10, 10))
    rate.begin(1000.0)
    rate.finish(1002.0, 10, 10)
    assert rate.seconds_until(1002.0, 3, 0) == 6


@pytest.mark.parametrize(("requests", "tokens", "expected"), [(0, 0, 1), (1, 0, 1), (10**9, 0, MOST_SECONDS)])
def test_the_answer_is_at_least_a_second_and_bounded(requests, tokens, expected):
    assert rate_of((0.01, 5, 5)).seconds_until(0.01, requests, tokens) == expected
