from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError, EngineError, InvariantError
from millpond.lab.arrivals import Traffic
from millpond.lab.batchbench import WatermarkSweep, choose_reserve, sweep_watermarks
from millpond.lab.faults import WithoutWaiver
from millpond.lab.lengths import Lengths
from millpond.lab.workload import WorkloadRequest

KEYS = [
    "watermark_blocks",
    "preemptions",
    "thrashed_admissions",
    "admissions",
    "iterations",
    "forward_tokens",
    "recomputed_tokens",
    "recompute_share",
    "completed",
]


def sweep_of(max_tokens=10, *, num_requests=8, prompt_tokens=6, slots=3, num_blocks=8, **changes):
    prompts, outputs = Lengths((prompt_tokens,)), Lengths((max_tokens,))
    workload = Traffic(num_requests=num_requests, prompt_tokens=prompts, max_tokens=outputs).requests()
    sizes = {"requests": workload, "num_blocks": num_blocks, "block_size": 4, "max_num_seqs": slots, "audit": True}
    return WatermarkSweep(**{**sizes, **changes})


COUNTER_CASE = sweep_of(19, slots=6, num_blocks=16)


def test_the_table_to_the_digit():
    points = sweep_watermarks(sweep_of(), [0, 1, 2, 3])
    rows = [
        (each.preemptions, each.thrashed_admissions, each.iterations, f"{each.recompute_share:.1%}") for each in points
    ]
    assert rows == [(4, 4, 38, "23.7%"), (3, 3, 41, "18.8%"), (1, 1, 41, "7.0%"), (0, 0, 41, "0.0%")]
    assert [(each.recomputed_tokens, each.forward_tokens) for each in points] == [
        (36, 152),
        (27, 144),
        (9, 128),
        (0, 120),
    ]
    assert [(each.watermark_blocks, each.admissions, each.completed) for each in points] == [
        (0, 12, 8),
        (1, 11, 8),
        (2, 9, 8),
        (3, 8, 8),
    ]


def test_the_counter_case_where_a_reserve_only_costs():
    without, with_reserve = sweep_watermarks(COUNTER_CASE, [0, 3])
    assert (without.preemptions, with_reserve.preemptions) == (5, 5)
    assert with_reserve.iterations - without.iterations == 4


def test_a_point_as_json_has_its_keys():
    (point,) = sweep_watermarks(sweep_of(), [2])
    assert list(point.as_json()) == KEYS
    assert point.as_json()["recompute_share"] == 9 / 128


def test_reserves_are_run_in_the_order_they_are_named():
    names = []
    points = sweep_watermarks(sweep_of(), [3, 0], names.append)
    assert names == ["reserve 3", "reserve 0"]
    assert [point.watermark_blocks for point in points] == [3, 0]


def test_budgets_may_differ_by_request():
    requests = tuple(WorkloadRequest(0.0, (1,) * 6, max_tokens) for max_tokens in (1, 5, 10, 3))
    (point,) = sweep_watermarks(sweep_of(requests=requests, num_blocks=64), [0])
    # The first three start at once; the fourth takes the slot that the first frees after its only step.
    assert (point.iterations, point.completed) == (11, 4)
    assert point.forward_tokens == 4 * 6 + 1 + 5 + 10 + 3 - 4


def test_a_request_comes_at_its_time():
    alone = WorkloadRequest(0.0, (1,) * 4, 4)
    late = replace(alone, arrival=1.0)
    plan = sweep_of(requests=(late, alone), step_seconds=0.25, slots=1)
    # Each drains alone: four steps and one that releases. With the late one there in step 4, it takes the freed slot.
    assert sweep_watermarks(replace(plan, step_seconds=0.1), [0])[0].iterations == 10
    assert sweep_watermarks(plan, [0])[0].iterations == 9
    assert sweep_watermarks(replace(plan, step_seconds=0.5), [0])[0].iterations == 9


def test_a_budget_of_tokens_makes_chunks():
    plan = sweep_of(requests=(WorkloadRequest(0.0, (1,) * 9, 1),), max_num_batched_tokens=4)
    assert sweep_watermarks(plan, [0])[0].iterations == 4  # 4 + 4 + 1 positions, and the release


def test_the_oldest_alone_needs_the_most_iterations_that_are_allowed():
    plan = sweep_of(requests=(WorkloadRequest(0.0, (1,) * 5, 3),), max_num_batched_tokens=1)
    (point,) = sweep_watermarks(plan, [0])
    assert point.iterations == 5 + 3 - 1 + 1
    assert plan.most_iterations == 9


def test_a_sweep_that_does_not_drain_is_refused_with_its_bound():
    wall = (WorkloadRequest(0.0, (1,) * 4, 16), WorkloadRequest(0.0, (2,) * 4, 12))
    plan = sweep_of(requests=wall, num_blocks=6, slots=2, audit=False)
    assert sweep_watermarks(plan, [3])[0].iterations == 20
    assert plan.most_iterations == 21 + 17
    steps = []

    class Counted(WithoutWaiver):
        def schedule(self):
            steps.append(self.counters.iterations)
            return super().schedule()

    with pytest.raises(EngineError, match=r"reserve 3 does not drain: 1 of 2 requests .* after 38 iterations"):
        sweep_watermarks(plan, [3], scheduler_class=Counted)
    assert len(steps) == 38 + 1


def test_with_the_audit_a_broken_rule_ends_the_sweep():
    class Thief(Scheduler):
        def _preempt(self, victim):
            return super()._preempt(self.running[0])

    with pytest.raises(InvariantError, match="INV-"):
        sweep_watermarks(sweep_of(), [0], scheduler_class=Thief)


@pytest.mark.parametrize(
    ("changes", "reserves", "message"),
    [
        ({}, [], r"no reserve to sweep.*--reserves"),
        ({}, [0, 2, 0], r"the reserve 0 is named 2 times \(--reserves\)"),
        ({}, [0, 8], r"a reserve of 8 blocks \(--reserves\) .* a pool of 8 \(--blocks\): name reserves from 0 to 7"),
        ({}, [-1], r"a reserve of -1 blocks"),
        ({"requests": ()}, [0], r"no request to sweep with \(--requests, --trace\)"),
        (
            {"max_tokens": 28},
            [0],
            r"the longest request .* needs 9 blocks of 4 tokens and the pool has 8; max_tokens",
        ),
        ({"step_seconds": 0.0}, [0], r"more than 0 seconds \(--step-seconds\), got 0"),
        ({"step_seconds": float("nan")}, [0], r"more than 0 seconds \(--step-seconds\), got nan"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_any_run(changes, reserves, message):
    names = []
    with pytest.raises(ConfigError, match=message):
        sweep_watermarks(sweep_of(**changes), reserves, names.append)
    assert names == []


def test_the_largest_reserve_and_the_largest_request_are_taken():
    (point,) = sweep_watermarks(sweep_of(27), [7])
    assert point.completed == 8


def test_auto_is_run_beside_the_fixed_ones_and_may_be_chosen():
    points = sweep_watermarks(sweep_of(), ["auto", 3, 0])
    assert [point.watermark_blocks for point in points] == ["auto", 3, 0]
    assert (points[0].preemptions, points[0].iterations, points[0].work) == (1, 38, 128 + 3 * 38)
    best, why = choose_reserve(points)
    assert best is points[0]
    assert why.startswith("reserve auto: against reserve 0 it has 3 fewer preemptions")
    # Of equals the fixed one.
    assert choose_reserve([replace(points[1], watermark_blocks="auto"), points[1]])[0] is points[1]


class TestChoice:
    def test_a_reserve_that_saves_more_than_it_costs(self):
        best, why = choose_reserve(sweep_watermarks(sweep_of(), [0, 1, 2, 3]))
        assert best.watermark_blocks == 3
        assert why.startswith("reserve 3: against reserve 0 it has 4 fewer preemptions, forwards 32 fewer positions ")
        assert "takes 3 more iterations, 8.6% less work" in why

    def test_none_where_a_brake_costs_more_than_it_saves(self):
        best, why = choose_reserve(sweep_watermarks(COUNTER_CASE, [3, 0]))
        assert best.watermark_blocks == 0
        assert "Reserve 3, the next best, has as many preemptions, forwards 1 more position" in why
        assert "takes 4 more iterations" in why

    def test_none_where_nothing_is_preempted(self):
        best, why = choose_reserve(sweep_watermarks(sweep_of(num_blocks=64), [2, 1, 0]))
        assert best.watermark_blocks == 0
        assert "nothing is preempted" in why

    def test_the_smallest_of_equals(self):
        points = sweep_watermarks(sweep_of(), [0, 3])
        equal = replace(points[1], watermark_blocks=5)
        assert choose_reserve([points[0], equal, points[1]])[0].watermark_blocks == 3

    def test_the_only_one(self):
        best, why = choose_reserve(sweep_watermarks(sweep_of(), [1]))
        assert (best.watermark_blocks, why) == (1, "reserve 1: the only one that was tried.")

    def test_work_is_positions_and_three_for_each_iteration(self):
        assert sweep_watermarks(sweep_of(), [0])[0].work == 152 + 3 * 38
