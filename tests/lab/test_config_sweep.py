from __future__ import annotations

import dataclasses

import pytest

from millpond.errors import ConfigError
from millpond.lab.config_sweep import Grid, Point, Setting, advise, choose, describe, pareto, sweep_configs
from millpond.lab.cost_model import CostModel
from millpond.lab.latency import Slo
from millpond.lab.workload import WorkloadRequest

A_SECOND = CostModel(1.0, (0.0, 0.0, 0.0, 0.0, 0.0), "")


def grid(**changes):
    fields = {"pool_tokens": (32,), "slots": (3,), "budgets": (64,), "block_sizes": (4,), "reserves": (0,)}
    return Grid(**{**fields, **changes})


def point(speed, ttft, slots=1, rate=5.0, good=None, **fields):
    setting = Setting(**{"pool_tokens": 64, "slots": slots, "budget": 64, "block_size": 4, "reserve": 0, **fields})
    return Point(setting, rate, speed, ttft / 2, ttft, 0.1, 0, 0.5, good)


def test_every_combination_runs_in_order():
    found = grid(slots=(4, 2), reserves=(0, 1)).settings
    assert [(each.slots, each.reserve) for each in found] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert grid(slots=(4, 2), reserves=(0, 1)).swept == ("slots", "reserve")


def test_a_pool_is_so_many_tokens_whatever_the_block_size():
    assert [each.config().num_blocks for each in grid(block_sizes=(4, 8, 5)).settings] == [8, 6, 4]


def test_a_setting_is_every_knob_of_the_engine():
    config = Setting(64, 3, 32, 8, 2).config()
    assert (config.num_blocks, config.max_num_seqs, config.max_num_batched_tokens) == (8, 3, 32)
    assert (config.block_size, config.watermark_blocks) == (8, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": ()}, "--slots must name at least one value"),
        ({"slots": tuple(range(1, 200)), "reserves": tuple(range(60))}, "make 11940 settings, more than 10000"),
        ({"slots": (3, 3)}, "--slots repeats a value: 3,3"),
        ({"budgets": (2, 9)}, "--budgets 2 is below --slots 3"),
        ({"reserves": (0, 8)}, "--reserves 8 leaves nothing of the 8 blocks that --pool-tokens 32"),
        ({"reserves": (0, -1)}, "--reserves must be at least 0, got -1"),
        ({"block_sizes": (64,)}, "--block-sizes 64 is more than --pool-tokens 32"),
    ],
)
def test_a_grid_that_cannot_work_is_refused_by_the_names_of_its_options(changes, message):
    with pytest.raises(ConfigError, match=message):
        grid(**changes)


def test_a_sweep_finds_the_numbers_of_the_design_at_each_reserve():
    workload = [WorkloadRequest(0.0, (0,) * 6, 10)] * 8
    names = []
    found = sweep_configs(grid(reserves=(0, 1, 2, 3)), {None: workload}, A_SECOND, Slo(), names.append)
    assert [(each.setting.reserve, each.preemptions) for each in found] == [(0, 4), (1, 3), (2, 1), (3, 0)]
    # The last of the 38 or 41 steps only releases.
    assert [each.output_tok_s for each in found] == pytest.approx([80 / 37, 80 / 40, 80 / 40, 80 / 40])
    assert names == [f"reserve {reserve}" for reserve in range(4)]
    assert {each.goodput_s for each in found} == {None}


def test_every_rate_is_a_point_of_its_own():
    def at(rate):
        return [WorkloadRequest(index / rate, (0,) * 6, 2) for index in range(20)]

    found = sweep_configs(grid(), {rate: at(rate) for rate in (0.1, 10.0)}, A_SECOND, Slo(ttft=1.5))
    assert [each.rate for each in found] == [0.1, 10.0]
    slow, fast = found
    assert slow.ttft_p99 == pytest.approx(1.0)
    assert fast.ttft_p99 > 5.0
    assert fast.output_tok_s > 2 * slow.output_tok_s
    assert slow.goodput_s == pytest.approx(slow.output_tok_s / 2)


def test_a_request_that_one_setting_could_not_serve_stops_the_sweep_before_it_starts():
    names, workload = [], [WorkloadRequest(0.0, (0,) * 40, 2)]
    with pytest.raises(ConfigError, match="give the pool more blocks"):
        sweep_configs(grid(pool_tokens=(64, 32)), {None: workload}, A_SECOND, Slo(), names.append)
    assert names == []


def test_the_front_is_what_nothing_beats():
    a, b, c = point(100, 1.0), point(200, 2.0), point(300, 4.0)
    beaten = [point(100, 2.0), point(150, 3.0), point(300, 5.0), point(90, 1.0)]
    assert pareto([c, *beaten, a, b]) == [a, b, c]


def test_without_an_slo_the_shortest_wait_near_the_best_throughput_is_chosen():
    points = [point(100, 5.0, 1), point(96, 2.0, 2), point(94, 1.0, 3)]
    assert choose(points).setting.slots == 2


def test_of_equals_the_smallest_setting_is_chosen():
    points = [point(100, 2.0, 8), point(99.5, 2.01, 4), point(99, 2.1, 2)]
    assert choose(points).setting.slots == 4
    assert choose([point(100, 2.0, 1, pool_tokens=128), point(100, 2.0, 8)]).setting.slots == 8


def test_with_an_slo_the_most_goodput_is_chosen():
    points = [point(100, 5.0, 1, good=2.0), point(50, 2.0, 2, good=4.0), point(60, 1.0, 3, good=3.95)]
    assert choose(points).setting.slots == 2


def test_the_advice_is_one_line_with_what_the_fastest_would_cost():
    points = [point(100, 5.0, 8), point(96, 2.0, 4)]
    assert advise(points, ("slots",)) == (
        "take 4 slots: at 5 requests a second 96 tok/s (96% of the most) and a p99 TTFT of 2.00 s; "
        "the most, with 8 slots, has 5.00 s"
    )
    assert advise([dataclasses.replace(points[0], rate=None)], ("slots",)) == (
        "take 8 slots: 100 tok/s (100% of the most) and a p99 TTFT of 5.00 s"
    )


def test_a_setting_is_described_by_what_is_swept_or_in_full():
    setting = Setting(4096, 8, 512, 16, 2)
    assert describe(setting, ("slots", "reserve")) == "8 slots, reserve 2"
    assert describe(setting, ()) == "a pool of 4,096 tokens, 8 slots, budget 512, blocks of 16, reserve 2"
