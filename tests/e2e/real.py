"""The real demo model under test: its settings, what must be left of it, and the command in a process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from millpond.core.step import Runner, SchedulerOutput, StepResult
from millpond.engine.engine import Engine

MAX_MODEL_LEN = 2048
KV_MEMORY = 256 * 2**20
# One thread: two that wait for each other in every layer are slow when others want the same cores.
SETTINGS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_memory": KV_MEMORY, "threads": 1, "audit": True}

MILLPOND = [sys.executable, "-m", "millpond.cli"]
BOUND_SECONDS = 120.0


def assert_nothing_is_left(engine: Engine) -> None:
    """Every block and slot is back and no table knows an id."""
    scheduler = engine.scheduler
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert sorted(scheduler.free_slots) == list(range(scheduler.max_num_seqs))
    assert (scheduler.requests, dict(scheduler.waiting), scheduler.running, scheduler.finished) == ({}, {}, [], [])
    assert engine._answers == {}


class Recorder:
    """A runner that remembers which tokens it gave to whom: the answers of an API that gives out text alone."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.token_ids: dict[str, list[int]] = {}
        self.num_steps = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        result = self.inner.execute(output)
        self.num_steps += 1
        for each in result.sampled:
            self.token_ids.setdefault(each.request_id, []).extend(each.token_ids)
        return result


def millpond(*arguments: str, stdin: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """One call of the command in a process of its own."""
    return subprocess.run(
        [*MILLPOND, *arguments], input=stdin, capture_output=True, text=True, timeout=BOUND_SECONDS, **options
    )
