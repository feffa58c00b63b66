from __future__ import annotations

from random import Random

import pytest

from millpond.errors import ConfigError
from millpond.lab.reserve_contest import KINDS, Result, contest, fixed_reserves

# Fewer requests, seeds and fixed reserves than `millpond sweep reserve` takes, from seeds on which nothing was chosen.
SEEDS, REQUESTS = (100,), 120
WINS = "bursts", "shift", "equal"


def rivals(name: str) -> list[int]:
    """Every fourth of the fixed reserves, and more around where the best ones lie."""
    every = fixed_reserves(KINDS[name].num_blocks)
    return sorted({*every[::4], *every[2:9:2]})


@pytest.mark.parametrize("name", WINS)
def test_it_beats_every_fixed_reserve_where_lengths_are_alike_or_the_traffic_changes(name):
    result = contest(name, SEEDS, REQUESTS, rivals(name))
    assert all(result.auto_work < work for work in result.fixed_work.values()), result


def test_with_long_prompts_it_loses_little_to_the_best_fixed_one_and_beats_none_at_all():
    result = contest("documents", SEEDS, REQUESTS, rivals("documents"))
    assert result.difference <= 0.02, result
    assert result.auto_work < result.fixed_work[0], result


@pytest.mark.slow
def test_so_it_does_with_heavy_tails_which_take_more_requests_to_know():
    result = contest("tails", range(100, 103), 240, [0, 16, 24, 32, 40, 48])
    assert result.difference <= 0.02, result
    assert result.auto_work < result.fixed_work[0], result


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_has_as_many_requests_as_asked_for_in_order_and_by_the_seed(name):
    once, again, other = (KINDS[name].requests(90, Random(seed)) for seed in (1, 1, 2))
    assert once == again != other
    assert len(once) == len(other) == 90
    assert [each.arrival for each in once] == sorted(each.arrival for each in once)


def test_the_traffic_that_shifts_does_so_half_way():
    requests = KINDS["shift"].requests(41, Random(0))
    assert [len(each.prompt_token_ids) <= 64 for each in requests] == [True] * 20 + [False] * 21


def test_fixed_reserves_go_through_the_whole_pool_finely():
    assert fixed_reserves(128)[:3] == [0, 4, 8]
    assert fixed_reserves(128)[-3:] == [104, 112, 120]
    assert len(fixed_reserves(256)) == 16 + 8


def test_the_best_fixed_reserve_is_the_smallest_of_equals():
    result = Result("x", 90, {4: 100, 0: 120, 2: 100})
    assert (result.best_reserve, round(result.difference, 6)) == (2, -0.1)
    assert result.as_json()["best_reserve"] == 2


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ConfigError, match="no kind of traffic 'x': name some of bursts"):
        contest("x", SEEDS, REQUESTS)
