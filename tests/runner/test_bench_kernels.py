"""Each phase of a step timed in its place, and set beside its floor."""

from dataclasses import replace

import numpy as np
import pytest

from millpond.build import build_model_runner
from millpond.errors import ConfigError
from millpond.kernels.roofline import NUM_PROBES, MachineRates
from millpond.kernels.threads import phases_walked
from millpond.model.arrays import kv_block_bytes
from millpond.model.floors import AFTER, BEFORE, LAYER, StepShape, phase_names
from millpond.runner import bench_kernels
from millpond.runner.bench_kernels import KernelPlan, PhaseRow, measure_kernels, step_report
from millpond.runner.phase_times import PhaseTimer, StepTimes
from tiny_llama import write_tiny_llama
from tiny_runner import TYPES, tiny_runner

RATES = MachineRates(1, "portable", {1 << 30: 1e9}, 1e9, {"u8 x s8": 1e9, "bf16": 1e9, "float32": 1e9})
PLAN = KernelPlan(decode=(1, 3), contexts=(20, 33), prefill=(40,), repetitions=1)


@pytest.fixture
def path(tmp_path):
    write_tiny_llama(tmp_path / "tiny.gguf", head_dim=32, types={"*": "Q8_0"})
    return tmp_path / "tiny.gguf"


def report_of(path, plan, names, monkeypatch, **options):
    monkeypatch.setattr(bench_kernels, "measure_machine", lambda isa, threads, notify: RATES)
    config = plan.config(**{"dtype": "auto", "isa": "auto", "threads": 1, **options})
    return measure_kernels(lambda config: build_model_runner(path, config), config, plan, names.append)


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_every_step_of_the_plan_is_reported_with_every_phase_of_its_walk(path, monkeypatch, types):
    names = []
    report = report_of(path, PLAN, names, monkeypatch, **types)
    assert [each.shape for each in report.steps] == PLAN.shapes
    assert names == ["loading the model", *(each.name for each in PLAN.shapes)]
    for step in report.steps:
        assert [row.phase for row in step.phases] == [BEFORE, "embed", *LAYER, "last norm", "head", AFTER]
        assert all(row.us > 0 for row in step.phases)
        assert all(row.floor_us > 0 for row in step.phases[1:])


def test_the_phases_of_a_step_add_up_to_it(path, monkeypatch):
    for step in report_of(path, PLAN, [], monkeypatch).steps:
        assert sum(row.us for row in step.phases) == pytest.approx(step.seconds * 1e6)
        assert sum(row.share for row in step.phases) == pytest.approx(1)


def test_the_plan_counts_what_it_announces(path, monkeypatch):
    names = []
    report_of(path, PLAN, names, monkeypatch)
    assert len(names) + NUM_PROBES == PLAN.num_measurements


def test_a_runner_of_the_plans_settings_takes_its_largest_step_and_no_more():
    config = PLAN.config(dtype="auto", isa="auto", threads=1)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (3, 40, 40)
    assert config.num_blocks == 3 * 3  # three sequences of 33 positions


@pytest.mark.parametrize("sizes", [{"decode": (), "prefill": ()}, {"contexts": (), "prefill": ()}])
def test_a_plan_without_a_step_is_refused(sizes):
    with pytest.raises(ConfigError, match="no step"):
        KernelPlan(**{"decode": (1,), "contexts": (9,), "prefill": (1,), "repetitions": 1, **sizes})


def test_a_plan_of_no_repetitions_is_refused():
    with pytest.raises(ConfigError, match="repetitions must be at least 1, got 0"):
        KernelPlan(decode=(1,), contexts=(9,), prefill=(), repetitions=0)


def test_a_phase_that_the_floors_do_not_know_is_an_error_and_not_left_out():
    with pytest.raises(KeyError, match="novel"):
        step_report(StepShape(1, 1, 9), StepTimes(1.0, {"novel": 1.0}, {"novel": 1.0}), {}, RATES)


def test_a_step_that_the_pool_does_not_hold_is_refused(path):
    timer = PhaseTimer(tiny_runner(path, num_blocks=4), num_blocks=4, block_size=16)
    with pytest.raises(ValueError, match="takes 6 blocks, the pool has 4"):
        timer.step(StepShape(3, 1, 17))


def test_sequences_share_no_block_and_the_last_token_is_at_the_end_of_the_context(path):
    timer = PhaseTimer(tiny_runner(path, num_blocks=9), num_blocks=9, block_size=16)
    scheduled = timer.step(StepShape(3, 2, 33)).scheduled
    blocks = [block for each in scheduled for block in each.block_ids]
    assert sorted(blocks) == list(range(9))
    assert {each.first_position + len(each.token_ids) for each in scheduled} == {33}


def test_the_cache_is_filled_before_it_is_read(path):
    runner = tiny_runner(path, num_blocks=4)
    timer = PhaseTimer(runner, num_blocks=4, block_size=16)
    assert all(np.all(part[:, runner._places[:4]] != 0) for part in runner._cache)
    assert timer.kv_position_bytes == kv_block_bytes(runner.config, np.uint16) / 16


def test_8_bit_keys_and_values_are_counted_and_timed_as_what_they_are(path):
    runner = tiny_runner(path, num_blocks=4, kv_dtype="int8")
    timer = PhaseTimer(runner, num_blocks=4, block_size=16)
    assert timer.kv_position_bytes == kv_block_bytes(runner.config, np.uint8) / 16
    assert timer.kv_dot == "u8 x s8"
    timer.once(timer.step(StepShape(1, 1, 50)))
    assert np.isfinite(runner._scratch.logits).all()


def test_the_median_of_the_repetitions_counts_and_the_first_step_does_not(path, monkeypatch):
    timer = PhaseTimer(tiny_runner(path), num_blocks=16, block_size=16)
    seconds = iter([99.0, 1.0, 5.0, 2.0])
    admissions = []

    def once(step):
        admissions.append(step.scheduled[0].admission is not None)
        each = next(seconds)
        return StepTimes(each, {"embed": each / 2}, {})

    monkeypatch.setattr(timer, "once", once)
    step = timer.running(StepShape(1, 1, 9))
    assert timer.measure(step, 3) == StepTimes(2.0, {"embed": 1.0}, {"embed": 0.5})
    assert admissions == [True, False, False, False]


def test_a_step_that_memory_bounds_is_set_beside_plain_reads_of_its_weights(path, monkeypatch):
    slow_memory = replace(RATES, reads={1 << 30: 1.0})
    monkeypatch.setattr(bench_kernels, "measure_machine", lambda isa, threads, notify: slow_memory)
    config = PLAN.config(dtype="auto", isa="auto", threads=1)
    runner = build_model_runner(path, config)
    report = measure_kernels(lambda config: runner, config, PLAN, lambda name: None)
    weights, kv = (
        sum(each.weights.nbytes for each in runner._packed.packed),
        kv_block_bytes(runner.config, np.uint16) / 16,
    )
    for step in report.steps[:2]:  # a row of the embedding for each sequence, and everything once
        assert step.bandwidth.num_bytes == pytest.approx(weights + step.shape.sequences * 20 * kv, rel=0.02)
        assert step.bandwidth.percent > 0 < step.bandwidth.rate
    assert report.as_json()["steps"][0]["bandwidth"]["num_bytes"] == report.steps[0].bandwidth.num_bytes


def test_a_step_that_products_bound_has_no_bandwidth(path, monkeypatch):
    fast_memory = replace(RATES, reads={1 << 30: 1e15})
    monkeypatch.setattr(bench_kernels, "measure_machine", lambda isa, threads, notify: fast_memory)
    config = PLAN.config(dtype="auto", isa="auto", threads=1)
    report = measure_kernels(lambda config: build_model_runner(path, config), config, PLAN, lambda name: None)
    assert [step.bandwidth for step in report.steps] == [None] * len(PLAN.shapes)
    assert report.as_json()["steps"][0]["bandwidth"] is None


def test_steps_after_the_timed_ones_read_no_clock(path):
    runner = tiny_runner(path)
    timer = PhaseTimer(runner, num_blocks=16, block_size=16)
    timer.once(timer.step(StepShape(1, 1, 9)))
    assert phases_walked(runner._scratch.sync) == len(phase_names(2))


def test_a_phase_at_its_floor_is_at_100_percent():
    row = PhaseRow("head", 1, 20.0, 15.0, 10.0, "memory", 0.5, 1.0, 1.0)
    assert row.percent_of_floor == 50.0


def test_json_holds_the_machine_and_every_phase(path, monkeypatch):
    report = report_of(path, PLAN, [], monkeypatch)
    printed = report.as_json()
    assert printed["machine"]["dot_operations_s"] == RATES.dots
    assert printed["machine"]["read_bytes_s"] == {str(1 << 30): 1e9}
    first = printed["steps"][0]
    assert (first["name"], first["sequences"], first["new_tokens"], first["context"]) == ("decode 1 at 20", 1, 1, 20)
    assert {"phase", "rows", "us", "best_us", "floor_us", "percent_of_floor", "bound_by", "share"} <= set(
        first["phases"][0]
    )
