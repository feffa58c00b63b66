from itertools import groupby

import pytest

from bench.peers.plan import Measurement, Plan, jobs, measurements, quick, turn

ENGINES = ("a", "b", "c")


def plan(**changes):
    return Plan(**{"contenders": ENGINES, "groups": ("decode", "w1"), **changes})


def test_each_round_begins_with_the_next_engine():
    assert [turn(ENGINES, round_)[0] for round_ in range(4)] == ["a", "b", "c", "a"]


def test_every_round_has_every_engine_once():
    for round_ in range(5):
        assert sorted(turn(ENGINES, round_)) == sorted(ENGINES)


def test_a_round_of_everything_comes_before_the_next_round_of_anything():
    some = [Measurement("decode/1", "offline", 1, 2, True), Measurement("decode/4", "offline", 4, 2, True)]
    order = [(job.round, job.measurement.key) for job in jobs(some, ENGINES)]
    assert [key for key, _ in groupby(order)] == [(r, key) for r in (0, 1, 2) for key in ("decode/1", "decode/4")]


def test_engines_alternate_within_a_measurement():
    order = [job.contender for job in jobs([Measurement("w1/offline", "offline", 64, 2, True)], ENGINES)]
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_only_what_warms_up_has_a_round_that_does_not_count():
    some = [Measurement("startup/warm", "server", 1, 1, False), Measurement("http/w1", "server", 64, 1, True)]
    counts = {(job.measurement.key, job.counts) for job in jobs(some, ("a",))}
    assert counts == {("startup/warm", True), ("http/w1", False), ("http/w1", True)}


def test_a_measurement_with_fewer_rounds_ends_earlier():
    some = [Measurement("a/1", "p", 1, 1, False), Measurement("b/1", "p", 1, 3, False)]
    assert [job.measurement.key for job in jobs(some, ("x",))] == ["a/1", "b/1", "b/1", "b/1"]


def test_only_the_groups_that_were_asked_for_are_measured():
    keys = [each.key for each in measurements(plan(groups=("w1", "prefill"), prefill=(128,)))]
    assert keys == ["prefill/128", "w1/offline"]


def test_every_size_and_rate_is_a_measurement():
    keys = {each.key for each in measurements(plan(groups=("decode", "poisson"), decode=(2, 3), rates=(0.5, 4.0)))}
    assert keys == {"decode/2", "decode/3", "poisson/0.5", "poisson/4"}


@pytest.mark.parametrize(("groups", "warms_up"), [(("startup",), True), (("startup", "w1"), False)])
def test_a_start_is_tried_once_before_it_counts_where_nothing_else_has_filled_the_caches(groups, warms_up):
    (start,) = (each for each in measurements(plan(groups=groups)) if each.group == "startup")
    assert start.warm_up is warms_up


def test_a_group_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match="'decods'"):
        plan(groups=("decods",))


def test_a_plan_survives_its_record():
    original = plan(rounds=5, seed=7, rates=(0.5,))
    assert Plan.from_json(original.as_json()) == original


def test_a_quick_run_has_one_round_of_the_same_engines_and_groups():
    short = quick(plan(rounds=5))
    assert (short.rounds, short.contenders, short.groups) == (1, ENGINES, ("decode", "w1"))
