from __future__ import annotations

import dataclasses

import pytest

from millpond.config import EngineConfig
from millpond.core.invariants import Auditor
from millpond.errors import ConfigError
from millpond.lab import driving
from millpond.lab.arrivals import Traffic
from millpond.lab.cost_model import CostModel
from millpond.lab.driving import NOTIFY_EVERY, RealClock, VirtualClock, drive
from millpond.lab.lengths import Lengths
from millpond.lab.simulator import simulate, simulated_engine
from millpond.lab.workload import WorkloadRequest

A_SECOND = CostModel(1.0, (0.0, 0.0, 0.0, 0.0, 0.0), "a second for every step")


def config(**changes):
    sizes = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    return EngineConfig(**{**sizes, "watermark_blocks": 0, **changes})


def request(arrival, prompt=6, output=3):
    return WorkloadRequest(arrival, (0,) * prompt, output)


def times(done):
    return [(each.first, each.last) for each in done.latencies.requests.values()]


def test_time_passes_as_the_cost_model_says_and_tokens_come_at_the_ends_of_steps():
    done = simulate([request(0.0), request(0.0)], config(), A_SECOND)
    assert times(done) == [(1.0, 3.0), (1.0, 3.0)]
    assert done.counters.iterations == 4  # the last one only releases, and takes no time
    assert list(done.latencies.itls) == [1.0] * 4


def test_the_parts_of_a_step_are_priced_by_its_shape():
    cost = CostModel(0.0, (0.0, 1.0, 0.0, 0.0, 0.0), "a second for every token")
    done = simulate([request(0.0, prompt=6, output=3)], config(), cost)
    assert times(done) == [(6.0, 8.0)]


def test_a_request_enters_between_steps_and_waits_from_its_arrival_on():
    done = simulate([request(0.0), request(0.5)], config(), A_SECOND)
    assert times(done) == [(1.0, 3.0), (2.0, 4.0)]
    assert [each.ttft for each in done.latencies.requests.values()] == [1.0, 1.5]


def test_priorities_of_a_workload_count_under_the_policy_that_knows_them_and_stop_no_other():
    plain = [request(0.0)] * 3
    given = [dataclasses.replace(each, priority=priority) for each, priority in zip(plain, (5, 0, -5), strict=True)]

    def ends(work, policy):
        return [last for _, last in times(simulate(work, config(max_num_seqs=1, policy=policy), A_SECOND))]

    assert ends(given, "priority") == [9.0, 6.0, 3.0]
    for policy in ("fcfs", "fair"):
        assert ends(given, policy) == ends(plain, policy) == [3.0, 6.0, 9.0]


def test_the_reserve_chooses_itself_where_the_settings_say_so():
    work = [request(0.0, prompt=6, output=10)] * 8
    tight = {"num_blocks": 8, "watermark_blocks": None}
    fixed, auto = (simulate(work, config(**tight, watermark=each), A_SECOND).counters for each in (0.0, "auto"))
    assert (fixed.preemptions, fixed.iterations) == (4, 38)
    assert (auto.preemptions, auto.iterations) == (1, 38)


def test_an_idle_engine_jumps_to_the_next_arrival():
    done = simulate([request(2.0), request(100.0)], config(), A_SECOND)
    assert times(done) == [(3.0, 5.0), (101.0, 103.0)]
    assert done.counters.iterations == 8
    assert done.latencies.seconds == 101.0


def test_a_chunk_is_a_step_of_its_own():
    done = simulate([request(0.0, prompt=10, output=1)], config(max_num_batched_tokens=4), A_SECOND)
    assert (times(done), done.counters.iterations) == ([(3.0, 3.0)], 4)


@pytest.mark.parametrize(("reserve", "evictions", "iterations"), [(0, 4, 38), (1, 3, 41), (2, 1, 41), (3, 0, 41)])
def test_it_is_the_real_scheduler(reserve, evictions, iterations):
    workload = [request(0.0, prompt=6, output=10)] * 8
    done = simulate(workload, config(num_blocks=8, watermark_blocks=reserve), A_SECOND)
    counters = done.counters
    assert (counters.preemptions, counters.thrashed_admissions, counters.iterations) == (
        evictions,
        evictions,
        iterations,
    )
    assert done.latencies.num_output_tokens == 80
    assert sum(span.num_preempted for span in done.pool.spans()) == evictions


def test_the_invariants_hold_at_every_step(monkeypatch):
    steps = []
    after_schedule = Auditor.after_schedule
    monkeypatch.setattr(
        Auditor, "after_schedule", lambda self, output: (steps.append(output), after_schedule(self, output))
    )
    lengths = {"prompt_tokens": Lengths(range(1, 13), drawn=True), "max_tokens": Lengths(range(1, 15), drawn=True)}
    workload = Traffic(num_requests=200, rate=0.5, burstiness=3.0, **lengths).requests()
    done = simulate(workload, config(num_blocks=8, audit=True), A_SECOND)
    assert done.counters.preemptions > 10
    assert len(steps) == done.counters.iterations


def test_the_same_arguments_give_the_same_result_to_the_bit():
    lengths = {"prompt_tokens": Lengths(range(1, 31), drawn=True), "max_tokens": Lengths(range(1, 31), drawn=True)}
    workload = Traffic(num_requests=100, rate=0.2, **lengths).requests()
    cost = CostModel(0.1, (0.01, 0.001, 0.003, 1e-4, 1e-5), "")
    one, other = simulate(workload, config(), cost), simulate(workload, config(), cost)
    assert times(one) == times(other)
    assert one.pool.spans() == other.pool.spans()
    assert dataclasses.asdict(one.counters) == dataclasses.asdict(other.counters)


def test_the_pool_is_full_of_what_runs_and_empty_at_the_end():
    done = simulate([request(0.0, prompt=4, output=5)] * 3, config(), A_SECOND)
    # 4 tokens are one block in the first second, 5 to 8 are two in the next four, for each of three requests.
    assert done.pool.mean_used_blocks == pytest.approx((3 + 4 * 6) / 5)
    assert (done.pool.most_used_blocks, done.pool.most_running, done.num_blocks) == (6, 3, 64)


def test_a_request_that_could_never_run_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"needs 10 blocks of 4 tokens and the pool has 8.*more blocks"):
        simulate([request(0.0), request(1.0, prompt=40, output=9)], config(num_blocks=8), A_SECOND)
    simulate([request(0.0, prompt=30, output=3)], config(num_blocks=8), A_SECOND)


def test_a_model_length_bounds_requests_too():
    with pytest.raises(ConfigError, match="more than max_model_len 8"):
        simulate([request(0.0)], config(max_model_len=8), A_SECOND)


def test_a_pool_of_no_size_is_refused():
    with pytest.raises(ConfigError, match="num_blocks must be given"):
        simulate([request(0.0)], EngineConfig(), A_SECOND)


def test_progress_is_told_now_and_then():
    told = []
    simulate([request(0.0, prompt=1, output=1)] * (2 * NOTIFY_EVERY + 1), config(), A_SECOND, told.append)
    assert told == [501, 1001]


def test_a_real_clock_is_slept_on_until_the_next_arrival(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr(driving.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        driving.time, "sleep", lambda seconds: (slept.append(seconds), now.__setitem__(0, now[0] + seconds))
    )
    engine = simulated_engine(config(), A_SECOND, VirtualClock())
    latencies = drive(engine, [request(0.0), request(7.0)], RealClock())
    assert slept == [7.0]
    assert [each.first for each in latencies.requests.values()] == [0.0, 7.0]
