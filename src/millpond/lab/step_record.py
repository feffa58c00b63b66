"""What a step was made of and how long it took: recorded from an engine, kept as one JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from millpond.core.step import Runner, SchedulerOutput, StepResult
from millpond.engine.engine import Engine
from millpond.errors import ConfigError
from millpond.lab.bench_overhead import observed, step_seconds


class StepShape(NamedTuple):
    """What the cost of a step depends on.

    num_sampled counts the positions whose logits are computed. read_positions is the K/V that is read once for each
    request, attended_positions the K/V that each token meets: the same for a request that decodes.
    """

    num_requests: int
    num_tokens: int
    num_sampled: int
    read_positions: int
    attended_positions: int

    @classmethod
    def of(cls, output: SchedulerOutput) -> StepShape:
        num_tokens = num_sampled = read = attended = 0
        for _, _, first, token_ids, _, samples, _, _, num_drafts in output.scheduled:
            count = len(token_ids)
            num_tokens += count
            read += first + count
            attended += count * first + count * (count + 1) // 2
            if samples:
                num_sampled += 1 + num_drafts
        return cls(len(output.scheduled), num_tokens, num_sampled, read, attended)


class StepRecord(NamedTuple):
    """One step of an engine: its shape, and its seconds from schedule to text."""

    shape: StepShape
    seconds: float


class ShapeRunner:
    """Another runner, and the shape of each step that it was given."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.shapes: list[StepShape] = []

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.shapes.append(StepShape.of(output))
        return self.inner.execute(output)


@contextmanager
def recorded(engine: Engine) -> Iterator[list[StepRecord]]:
    """Every step that the engine takes inside and that computes something; the list is filled at the end."""
    records: list[StepRecord] = []
    inner, runner = engine.runner, ShapeRunner(engine.runner)
    engine.runner = runner
    try:
        with observed(engine) as steps:
            yield records
    finally:
        engine.runner = inner
    seconds = [step_seconds(each) for each in steps if each.num_scheduled]
    records += map(StepRecord, runner.shapes, seconds)


def write_records(records: Iterable[StepRecord], path: Path) -> None:
    """One line for each step: the fields of its shape, and seconds."""
    with path.open("w", encoding="utf-8") as file:
        for shape, seconds in records:
            file.write(json.dumps({**shape._asdict(), "seconds": round(seconds, 7)}) + "\n")


def read_records(path: Path) -> list[StepRecord]:
    """What write_records wrote. Raises ConfigError with the file and the line for anything else, or no step at all."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; make one with: millpond bench engine --record {path.name}")
    with path.open(encoding="utf-8", errors="replace") as file:
        records = [_parse(line, f"{path}, line {number}") for number, line in enumerate(file, 1) if line.strip()]
    if not records:
        raise ConfigError(f"{path} holds no steps; make it with: millpond bench engine --record {path.name}")
    return records


def _parse(line: str, place: str) -> StepRecord:
    try:
        fields = json.loads(line)
    except ValueError:
        raise ConfigError(f"{place} is not JSON") from None
    values = [fields.get(name) for name in StepShape._fields] if isinstance(fields, dict) else [None]
    if not all(type(value) is int and value >= 0 for value in values):
        raise ConfigError(f"{place} needs {', '.join(StepShape._fields)}, each a whole number")
    seconds = fields.get("seconds")
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        raise ConfigError(f"{place} needs seconds, a number above 0, got {seconds!r}")
    return StepRecord(StepShape(*values), seconds)
