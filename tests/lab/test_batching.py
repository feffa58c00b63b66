from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from helpers import make_scheduler
from millpond.core.step import RequestFault, SampledTokens, StepResult
from millpond.errors import ConfigError, EngineError
from millpond.lab.arrivals import Traffic, with_random_prompts
from millpond.lab.batch_run import Row
from millpond.lab.batchbench import BatchBench, report_of
from millpond.lab.lengths import Lengths
from millpond.lab.stepping import ChecksumRunner
from millpond.lab.workload import WorkloadRequest


def workload(*lengths):
    """Requests of (prompt tokens, output tokens), each with a prompt of its own."""
    return tuple(WorkloadRequest(0.0, (index + 1,) * prompt, out) for index, (prompt, out) in enumerate(lengths))


def bench_of(requests, runner=None, clock=None, **sizes):
    runner = runner or ChecksumRunner()
    scheduler = make_scheduler(**{"num_blocks": 64, "slots": 2, **sizes})
    return BatchBench(scheduler, runner, clock or runner.clock, requests)


# Two slots: a static run takes (0, 1), (2, 3) and (4); the longest of each batch has 6, 4 and 3 new tokens.
FIVE = workload((4, 6), (2, 2), (3, 4), (5, 1), (1, 3))


def kinds(run, request):
    return [share.kind for step in run.steps for share in step.shares if share.request == request]


class TestStatic:
    def test_a_batch_runs_until_its_longest_is_done_and_the_next_begins_in_the_very_next_step(self):
        run = bench_of(FIVE).static()
        assert [list(batch) for batch in run.batches] == [[0, 1], [2, 3], [4]]
        assert len(run.steps) == 6 + 4 + 3
        assert [{share.request for share in step.shares} for step in run.steps] == [{0, 1}] * 6 + [{2, 3}] * 4 + [
            {4}
        ] * 3

    def test_a_row_that_is_done_is_dead_until_then(self):
        run = bench_of(FIVE).static()
        assert kinds(run, 1) == [Row.PREFILL, Row.DECODE] + [Row.DEAD] * 4
        assert kinds(run, 3) == [Row.PREFILL] + [Row.DEAD] * 3

    def test_dead_rows_are_issued_and_of_no_use(self):
        run = bench_of(FIVE).static()
        prompts = 4 + 2 + 3 + 5 + 1
        assert run.issued_tokens == prompts + 2 * 5 + 2 * 3 + 2
        assert run.useful_tokens == prompts + 5 + 1 + 3 + 0 + 2
        assert run.waste == 1 - 26 / 33

    def test_answers_are_held_until_the_batch_is_over(self):
        delays = bench_of(FIVE).static().delays()
        assert [each.wait for each in delays] == [0, 0, 6, 6, 10]
        assert [each.delivered for each in delays] == [6, 6, 10, 10, 13]
        assert [each.head_of_line_delay for each in delays] == [0, 4, 0, 3, 0]
        assert [each.inflation for each in delays] == [6 / 6, 6 / 2, 10 / 4, 10 / 1, 13 / 3]

    def test_a_batch_takes_no_more_than_the_pool_holds_to_its_end(self):
        # Blocks of 4: each row of the first batch may grow to 4 + 6 - 1 positions, which take 3 blocks.
        assert list(bench_of(FIVE, num_blocks=6).static_batches()) == [[0, 1], [2, 3], [4]]
        assert list(bench_of(FIVE, num_blocks=4).static_batches()) == [[0], [1, 2], [3, 4]]

    def test_it_never_preempts(self):
        drawn = Lengths(range(1, 12), drawn=True)
        requests = Traffic(num_requests=40, prompt_tokens=drawn, max_tokens=drawn).requests()
        bench = bench_of(with_random_prompts(requests, 50, seed=0), num_blocks=9, slots=4)
        assert bench.static().preemptions == 0
        assert bench.continuous().preemptions > 0

    def test_no_row_runs_beyond_the_longest_request_that_the_model_takes(self):
        requests = workload((9, 1), (1, 9))
        assert list(bench_of(requests, max_model_len=10).static_batches()) == [[0], [1]]
        assert list(bench_of(requests, max_model_len=18).static_batches()) == [[0, 1]]


class TestContinuous:
    def test_a_slot_is_filled_in_the_step_that_frees_it(self):
        run = bench_of(FIVE).continuous()
        in_step = [sorted(share.request for share in step.shares) for step in run.steps]
        assert in_step == [[0, 1], [0, 1], [0, 2], [0, 2], [0, 2], [0, 2], [3, 4], [4], [4]]

    def test_nothing_is_wasted_or_held(self):
        run = bench_of(FIVE).continuous()
        assert run.issued_tokens == run.useful_tokens == 26
        assert run.waste == 0
        assert [each.head_of_line_delay for each in run.delays()] == [0] * 5
        assert [each.delivered for each in run.delays()] == [6, 2, 6, 7, 9]

    def test_goodput_is_the_tokens_asked_for_in_a_step(self):
        bench = bench_of(FIVE)
        assert bench.static().goodput == 16 / 13
        assert bench.continuous().goodput == 16 / 9

    def test_what_is_computed_again_after_a_preemption_is_waste(self):
        requests = workload(*[(6, 10)] * 8)
        bench = bench_of(requests, num_blocks=8, slots=3)
        assert [bench.continuous().preemptions for _ in range(2)] == [4, 4]
        run = bench.continuous()
        assert run.useful_tokens == 120
        # The scheduler counts 36 of 152 as recomputed, with the newest token of each, whose K/V never was.
        assert run.issued_tokens == 152
        again = [share for step in run.steps for share in step.shares if share.kind is Row.RECOMPUTE]
        assert len(again) == 4
        assert [(share.issued, share.useful) for share in again] == [(9, 1)] * 4

    def test_a_prompt_in_chunks_is_prefill_in_each_of_them(self):
        run = bench_of(workload((9, 3)), budget=4).continuous()
        assert kinds(run, 0) == [Row.PREFILL] * 3 + [Row.DECODE] * 2
        assert run.delays()[0].inflation == 1


class TestCompare:
    def test_both_sides_give_every_request_the_tokens_it_asked_for(self):
        static, continuous = bench_of(FIVE).compare()
        assert static.outputs == continuous.outputs
        assert [len(output) for output in static.outputs] == [6, 2, 4, 1, 3]

    def test_other_tokens_on_one_side_are_a_bug(self):
        class Liar(ChecksumRunner):
            def execute(self, output):
                result = super().execute(output)
                if self.num_steps <= 13:  # those of the static run
                    return result
                return StepResult(tuple(SampledTokens(each.request_id, (7,)) for each in result.sampled))

        with pytest.raises(EngineError, match="request 1 asked for 6 tokens: 6 in a static batch and 6 in continuous"):
            bench_of(FIVE, Liar()).compare()

    def test_a_fault_of_the_runner_ends_it_by_name(self):
        class Faulty(ChecksumRunner):
            def execute(self, output):
                result = super().execute(output)
                faults = tuple(RequestFault(each.request_id, "not finite") for each in result.sampled)
                return StepResult((), faults)

        with pytest.raises(EngineError, match="request batch-1-0: not finite"):
            bench_of(FIVE, Faulty()).compare()

    def test_the_scheduler_is_idle_again(self):
        bench = bench_of(FIVE)
        bench.compare(rounds=2)
        assert not bench.scheduler.has_work
        assert bench.scheduler.pool.num_free == bench.scheduler.pool.num_blocks

    def test_the_policies_take_turns_after_a_round_that_warms_up(self):
        names = []
        bench_of(FIVE).compare(rounds=2, warm_up=True, notify=names.append)
        rounds = ("warm-up", "round 1", "round 2")
        assert names == [f"{policy}, {name}" for name in rounds for policy in ("static", "continuous")]

    def test_the_run_of_median_duration_counts_and_the_warm_up_does_not(self, monkeypatch):
        bench = bench_of(FIVE)
        outputs = bench.static().outputs
        seconds = {"static": iter((0, 3, 1, 2)), "continuous": iter((99, 10, 30, 20))}
        for policy, durations in seconds.items():
            monkeypatch.setattr(
                BatchBench, policy, lambda self, left=durations: SimpleNamespace(duration=next(left), outputs=outputs)
            )
        assert [run.duration for run in bench.compare(rounds=3, warm_up=True)] == [2, 20]

    def test_steps_are_timed_by_the_clock_that_is_given(self):
        ticks = count(100.0, 0.5)
        static, _ = bench_of(FIVE, clock=lambda: next(ticks)).compare()
        # The clock is read before and after each of the 13 steps.
        assert (static.duration, static.start) == (12.5, 100.0)
        assert static.goodput == 16 / 12.5
        assert [each.delivered for each in static.delays()] == [5.5, 5.5, 9.5, 9.5, 12.5]
        assert static.delays()[1].inflation == 5.5 / (2 * 0.5)

    def test_a_report_has_the_workload_and_both_sides(self):
        bench = bench_of(FIVE)
        report = report_of(bench, *bench.compare(), "step")
        assert report["workload"][1] == {"prompt_tokens": 2, "output_tokens": 2}
        assert (report["unit"], report["slots"], report["num_blocks"], report["block_size"]) == ("step", 2, 64, 4)
        assert report["same_tokens"] is True
        static = report["static"]
        assert (static["batches"], static["steps"], static["duration"]) == (3, 13, 13)
        assert (static["issued_tokens"], static["useful_tokens"], static["preemptions"]) == (33, 26, 0)
        assert static["goodput_per_step"] == pytest.approx(16 / 13, abs=1e-6)
        assert (static["mean_head_of_line_delay"], static["max_head_of_line_delay"]) == (1.4, 4)
        assert static["requests"][1] == {"wait": 0, "head_of_line_delay": 4, "delivered": 6, "inflation": 3}
        assert len(report["continuous"]["requests"]) == 5

    def test_no_rounds_are_refused(self):
        with pytest.raises(ConfigError, match=r"rounds must be at least 1 \(--rounds\), got 0"):
            bench_of(FIVE).compare(rounds=0)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ((), "no request to batch"),
        ((WorkloadRequest(1.5, (1,), 1),), "all requests there at 0 seconds, one comes at 1.5"),
        (workload((1, 1), (4, 300)), "the longest request could never run: .*needs 76 blocks .*more blocks"),
    ],
)
def test_a_workload_that_cannot_be_compared_is_refused(requests, message):
    with pytest.raises(ConfigError, match=message):
        bench_of(requests)
