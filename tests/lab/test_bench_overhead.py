from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.core.step import RunnerTimes
from millpond.lab.bench_engine import DECODE_STEPS
from millpond.lab.bench_overhead import PARTS, StepRow, measure_steps, observed
from tiny_engine import make_engine

TIMES = RunnerTimes(1.0, 80.0, 2.0)


class Timed:
    """A runner that says what it took, and takes it on its clock: 90 seconds a step."""

    def __init__(self, inner):
        self.inner = inner
        self.now = 0.0

    def execute(self, output):
        self.now += 90.0
        return replace(self.inner.execute(output), times=TIMES)


@pytest.fixture
def engine():
    engine = make_engine(wrap=Timed, max_num_seqs=4, num_blocks=400, max_model_len=512, max_num_batched_tokens=256)
    engine._clock = lambda: engine.runner.now
    return engine


def test_each_part_and_the_share_outside_of_the_forward_pass_are_medians_over_decode_steps(engine):
    row = measure_steps(engine, 2, rounds=2, clock=lambda: engine.runner.now)
    assert row == StepRow(2, dict(zip(PARTS, (0.0, 1.0, 80.0, 2.0, 0.0, 0.0), strict=True)), 90.0, pytest.approx(1 / 9))
    assert row.as_json() == {
        "sequences": 2,
        "microseconds": {"schedule": 0, "arrays": 1e6, "forward": 80e6, "sample": 2e6, "update": 0, "text": 0},
        "step_microseconds": 90e6,
        "outside_share": 0.1111,
    }


def test_only_steps_in_which_every_sequence_decodes_count(engine, monkeypatch):
    counted = []
    monkeypatch.setattr(StepRow, "of", lambda num_sequences, steps: counted.extend(steps))
    measure_steps(engine, 3, rounds=2, clock=lambda: engine.runner.now)
    assert {(each.num_scheduled, each.num_tokens, each.num_sampled) for each in counted} == {(3, 3, 3)}
    assert len(counted) == 2 * DECODE_STEPS


def test_the_engines_own_observer_is_back_afterwards_whatever_happens(engine):
    def own(stats):
        """Hears of nothing here."""

    def failing():
        with observed(engine) as steps:
            engine.step()
            raise RuntimeError(len(steps))

    engine.observer = own
    with pytest.raises(RuntimeError, match="1"):
        failing()
    assert engine.observer is own
