"""What a step was made of and how long it took: recorded from an engine, kept as one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from millpond.core.step import Runner, SchedulerOutput, StepResult
from millpond.engine.engine import Engine
from millpond.lab.bench_overhead import observed, step_seconds
from millpond.lab.jsonl import number, read_objects, whole_number

MOST_COUNTED = 10**12  # positions: a step of the longest prompt attends to half as many
LEAST_SECONDS, MOST_SECONDS = 1e-7, 1e5  # a step between a record's last digit and a day


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
    remedy = f"make one for --cost with: millpond bench engine --record {path.name}"
    return [_record(fields, place) for place, fields in read_objects(path, remedy)]


def _record(fields: Mapping[str, Any], place: str) -> StepRecord:
    counts = [whole_number(fields, name, place, int(name != "num_sampled"), MOST_COUNTED) for name in StepShape._fields]
    return StepRecord(StepShape(*counts), number(fields, "seconds", place, LEAST_SECONDS, MOST_SECONDS))
