"""One run of a batching policy over a workload, step by step, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from statistics import fmean
from typing import NamedTuple

from millpond.lab.workload import WorkloadRequest


class Row(Enum):
    """What a request's share of a step was for. A dead row is past its request's end and waits for its batch's."""

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    DEAD = "dead"


class Share(NamedTuple):
    """A request (its place in the workload) in one step: positions forwarded, and those it needed and did not have."""

    request: int
    kind: Row
    issued: int
    useful: int


@dataclass(frozen=True, slots=True)
class BatchStep:
    """When one step began and ended, on the clock of the run, and who was in it."""

    start: float
    end: float
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class RequestDelay:
    """One request's way from the start of the run, in the unit of its clock.

    wait: until its first step. head_of_line_delay: from its last own token to its delivery, which in a static batch is
    the end of the longest. inflation: the time to its delivery over the time of the steps that moved it on.
    """

    wait: float
    head_of_line_delay: float
    delivered: float
    inflation: float


@dataclass(slots=True)
class BatchRun:
    """batches: the requests that were begun together. holds_answers: a batch is delivered when all of it is done."""

    requests: Sequence[WorkloadRequest]
    batches: Sequence[Sequence[int]]
    holds_answers: bool
    steps: list[BatchStep] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    preemptions: int = 0

    @property
    def start(self) -> float:
        return self.steps[0].start

    @property
    def duration(self) -> float:
        return self.steps[-1].end - self.start

    @property
    def issued_tokens(self) -> int:
        """All positions forwarded."""
        return sum(share.issued for step in self.steps for share in step.shares)

    @property
    def useful_tokens(self) -> int:
        """The positions that each request needs once: its prompt, and its output but for the last token."""
        return sum(share.useful for step in self.steps for share in step.shares)

    @property
    def waste(self) -> float:
        """The share of the issued tokens that nobody needed."""
        return 1 - self.useful_tokens / self.issued_tokens

    @property
    def goodput(self) -> float:
        """Output tokens that were asked for, per unit of the clock."""
        return sum(each.max_tokens for each in self.requests) / self.duration

    def delays(self) -> list[RequestDelay]:
        """By request."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        own = [0.0] * len(self.requests)
        for step in self.steps:
            for share in step.shares:
                first.setdefault(share.request, step.start - self.start)
                if share.useful:
                    own[share.request] += step.end - step.start
                    last[share.request] = step.end - self.start
        given = last
        if self.holds_answers:
            given = {index: max(last[each] for each in batch) for batch in self.batches for index in batch}
        return [
            RequestDelay(first[index], given[index] - last[index], given[index], given[index] / own[index])
            for index in range(len(self.requests))
        ]

    def as_json(self, unit: str) -> dict[str, object]:
        """Everything but the tokens; times are in the unit of the clock ("step" or "second")."""
        delays = self.delays()
        columns = {name: [getattr(each, name) for each in delays] for name in RequestDelay.__slots__}
        return {
            "batches": len(self.batches),
            "steps": len(self.steps),
            "duration": round(self.duration, 6),
            "issued_tokens": self.issued_tokens,
            "useful_tokens": self.useful_tokens,
            "waste": round(self.waste, 6),
            f"goodput_per_{unit}": round(self.goodput, 6),
            "preemptions": self.preemptions,
            **{f"mean_{name}": round(fmean(values), 6) for name, values in columns.items()},
            **{f"max_{name}": round(max(values), 6) for name, values in columns.items()},
            "requests": [{name: round(value, 6) for name, value in asdict(each).items()} for each in delays],
        }
