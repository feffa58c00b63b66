"""The loop around the real scheduler where no engine is needed, and a runner that needs no model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from zlib import crc32

from millpond.core.invariants import Auditor
from millpond.core.scheduler import RequestUpdate, Scheduler
from millpond.core.step import Runner, SampledTokens, SchedulerOutput, StepResult

CHECKSUM_TOKENS = 1 << 16  # the vocabulary where there is no model
NO_LIMIT = 1 << 62  # of its longest request, and of token ids that nobody looks up


@dataclass(slots=True)
class ChecksumRunner:
    """A Runner whose next token is a checksum of all tokens before it, so that a slip of one changes all that follow.

    Its clock counts the steps that it has run.
    """

    num_steps: int = 0
    _sums: dict[int, int] = field(default_factory=dict)

    def clock(self) -> float:
        return float(self.num_steps)

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.num_steps += 1
        sampled = []
        for each in output.scheduled:
            before = self._sums[each.slot] if each.first_position else 0
            self._sums[each.slot] = crc32(array("q", each.token_ids).tobytes(), before)
            if each.samples:
                token_id = self._sums[each.slot] % CHECKSUM_TOKENS
                sampled.append(SampledTokens(each.request_id, (token_id,)))
        return StepResult(tuple(sampled))


@dataclass(slots=True)
class StepLoop:
    """Schedule, execute, update: what an engine's step is without its text."""

    scheduler: Scheduler
    runner: Runner
    auditor: Auditor | None = None

    def step(self) -> tuple[SchedulerOutput, tuple[RequestUpdate, ...]]:
        """What the scheduler decided, and what each request got. Raises InvariantError where it is audited."""
        output = self.scheduler.schedule()
        if self.auditor is not None:
            self.auditor.after_schedule(output)
        result = self.runner.execute(output) if output.scheduled else StepResult(())
        updates = self.scheduler.update(result)
        if self.auditor is not None:
            self.auditor.after_update(result)
        return output, updates
