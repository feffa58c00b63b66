"""Where a decode step's time goes, part by part, and what share of it is outside of the compiled forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median

from millpond.core.step import Clock, StepStats
from millpond.engine.engine import Engine
from millpond.lab.bench_engine import EngineBench

# The parts of a step in the order in which they run.
PARTS: dict[str, Callable[[StepStats], float]] = {
    "schedule": lambda stats: stats.schedule_seconds,
    "arrays": lambda stats: stats.times.arrays_seconds,
    "forward": lambda stats: stats.times.forward_seconds,
    "sample": lambda stats: stats.times.sample_seconds,
    "update": lambda stats: stats.update_seconds,
    "text": lambda stats: stats.text_seconds,
}


def step_seconds(stats: StepStats) -> float:
    """The whole step, from its schedule to its texts."""
    return stats.schedule_seconds + stats.execute_seconds + stats.update_seconds + stats.text_seconds


@dataclass(frozen=True, slots=True)
class StepRow:
    """Decode steps of num_sequences: median seconds of each part and of the whole, median share outside the forward."""

    num_sequences: int
    parts: dict[str, float]
    step: float
    outside: float

    @classmethod
    def of(cls, num_sequences: int, steps: Sequence[StepStats]) -> StepRow:
        parts = {name: median(map(read, steps)) for name, read in PARTS.items()}
        outside = median(1 - stats.times.forward_seconds / step_seconds(stats) for stats in steps)
        return cls(num_sequences, parts, median(map(step_seconds, steps)), outside)

    def as_json(self) -> dict[str, object]:
        return {
            "sequences": self.num_sequences,
            "microseconds": {name: round(1e6 * seconds, 1) for name, seconds in self.parts.items()},
            "step_microseconds": round(1e6 * self.step, 1),
            "outside_share": round(self.outside, 4),
        }


@contextmanager
def observed(engine: Engine) -> Iterator[list[StepStats]]:
    """The numbers of every step that the engine takes inside."""
    steps: list[StepStats] = []
    observer, engine.observer = engine.observer, steps.append
    try:
        yield steps
    finally:
        engine.observer = observer


def measure_steps(engine: Engine, num_sequences: int, rounds: int, clock: Clock) -> StepRow:
    """Decode as in `bench engine`, one round that is not counted and then `rounds`; every step of those counts alike.

    Raises EngineError where the pool cannot hold all the sequences.
    """
    bench = EngineBench(engine, engine.limits.vocab_size, clock)
    random = Random(num_sequences)
    bench.decode(num_sequences, random)
    with observed(engine) as steps:
        for _ in range(rounds):
            bench.decode(num_sequences, random)
    return StepRow.of(num_sequences, [each for each in steps if each.num_tokens == each.num_sampled == num_sequences])
