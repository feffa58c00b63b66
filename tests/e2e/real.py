"""The real demo model under test: engines over one runner, what a request got, and the command in a process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millpond.core.disk_prefixes import DiskPrefixes
from millpond.core.request import FinishReason, SamplingParams
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import Drafter
from millpond.core.step import Runner, SchedulerOutput, StepResult
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput

MAX_MODEL_LEN = 2048
KV_MEMORY = 256 * 2**20
# One thread: two that wait for each other in every layer are slow when others want the same cores.
SETTINGS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_memory": KV_MEMORY, "threads": 1, "audit": True}

MILLPOND = [sys.executable, "-m", "millpond.cli"]
BOUND_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, how to sample, and the fields of the same request over HTTP."""

    prompt: list[int]
    sampling: SamplingParams

    def body(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "ignore_eos")
        fields = {name: getattr(self.sampling, name) for name in names}
        return {"prompt": self.prompt, **{name: value for name, value in fields.items() if value is not None}}


@dataclass(slots=True)
class Got:
    """What one request got: everything that must not depend on its neighbours."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.new_token_ids
        self.text += output.text
        self.finish_reason = output.finish_reason


def engine_over(
    base: Engine,
    *,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    drafter: Drafter | None = None,
    prefix_cache: bool = False,
    disk: DiskPrefixes | None = None,
    **sizes: int,
) -> Engine:
    """A fresh engine with a scheduler of its own over the base's runner, its sizes at most the base's.

    With a drafter, no more rows than the base has slots may sample in a step.

    They share the runner's K/V, so only one of them may have work at a time, and one with a prefix cache is of no more
    use once another has worked.
    """
    config = dataclasses.replace(base.config, **{"watermark_blocks": 0, **sizes})
    scheduler = Scheduler(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        watermark_blocks=config.watermark_blocks,
        drafter=drafter,
        prefix_cache=prefix_cache,
        disk=disk,
    )
    return Engine(
        config=config,
        scheduler=scheduler,
        runner=wrap(base.runner),
        tokenizer=base.tokenizer,
        model_name=base.model_name,
        vocab_size=base.limits.vocab_size,
    )


def drive(engine: Engine, asks: Mapping[str, Ask], *, max_steps: int = 1000) -> dict[str, Got]:
    """Put all requests in at once and step until nothing is left; more than max_steps is a failure."""
    for name, ask in asks.items():
        engine.add_request(name, ask.prompt, ask.sampling)
    got = {name: Got() for name in asks}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return got
        for output in engine.step():
            got[output.request_id].add(output)
    raise AssertionError(f"not drained after {max_steps} steps")


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
