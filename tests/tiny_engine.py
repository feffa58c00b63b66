"""An engine with no model: the real scheduler, tokenizer and text side over a scripted runner."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from helpers import ScriptedRunner
from millpond.config import EngineConfig
from millpond.core.disk_prefixes import DiskPrefixes
from millpond.core.policies import make_policy
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import Drafter
from millpond.core.step import Runner, SchedulerOutput, StepResult
from millpond.engine.engine import Engine
from millpond.text.tokenizer import Tokenizer
from tiny_llama import tokenizer_metadata, vocabulary

T = TypeVar("T")

BOUND_SECONDS = 30.0
IM_START, IM_END = 1, 2
LETTERS = range(3 + ord("a"), 3 + ord("z") + 1)  # the token of a byte is the byte plus three special tokens


@cache
def tiny_tokenizer() -> Tokenizer:
    return tokenizer_with()


def tokenizer_with(**metadata: Any) -> Tokenizer:
    """The tiny tokenizer with some of its metadata replaced; tokenizer.ggml. goes before each name."""
    changed = {f"tokenizer.{name.replace('__', '.')}": value for name, value in metadata.items()}
    everything = {**tokenizer_metadata(*vocabulary()), **changed}
    return Tokenizer.from_gguf({key: value for key, value in everything.items() if value is not None})


def ids(text: str) -> list[int]:
    """One token for each byte of text, unlike what the tokenizer itself would choose."""
    return [3 + byte for byte in text.encode()]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    watermark_blocks: int = 0,
    script: Mapping[str, Sequence[int]] | None = None,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    tokenizer: Tokenizer | None = None,
    audit: bool = True,
    seed: int = 0,
    drafter: Drafter | None = None,
    prefix_cache: bool = True,
    policy: str = "fcfs",
    disk: Callable[[ScriptedRunner], DiskPrefixes | None] = lambda runner: None,
    embedding_size: int = 0,
    whole_prompts: bool = False,
    **runner_settings: Any,
) -> Engine:
    """wrap goes around the scripted runner, which is engine.runner without it."""
    tokenizer = tokenizer or tiny_tokenizer()
    sizes = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "watermark_blocks": watermark_blocks,
    }
    runner = ScriptedRunner(block_size=block_size, tokens=LETTERS, script=script, **runner_settings)
    return Engine(
        config=EngineConfig(**sizes, audit=audit, seed=seed, threads=2, prefix_cache=prefix_cache, policy=policy),
        scheduler=Scheduler(
            **sizes,
            drafter=drafter,
            prefix_cache=prefix_cache,
            policy=make_policy(policy, {}),
            disk=disk(runner),
            whole_prompts=whole_prompts,
        ),
        runner=wrap(runner),
        tokenizer=tokenizer,
        model_name="tiny",
        vocab_size=tokenizer.vocab_size,
        embedding_size=embedding_size,
    )


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class GatedRunner:
    """A runner whose steps a test lets through one by one; entered says that a step has begun."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.entered = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self.open = False

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.entered.release()
        if not self.open:
            assert self._permits.acquire(timeout=BOUND_SECONDS), "no test let this step through"
        return self.inner.execute(output)

    def let_through(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open_for_good(self) -> None:
        self.open = True
        self._permits.release()

    async def wait_until_entered(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            assert await asyncio.to_thread(self.entered.acquire, timeout=BOUND_SECONDS), "the engine took no step"


class UnhurriedRunner:
    """Each of its steps lets go of the interpreter for a while, as a forward pass does. Where none does, the event loop
    falls behind the engine's thread, and readers with it."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner

    def execute(self, output: SchedulerOutput) -> StepResult:
        time.sleep(0.001)
        return self.inner.execute(output)


def steps_of(engine_runner: ScriptedRunner, request_id: str) -> int:
    """How many steps a request was scheduled in."""
    return sum(each.request_id == request_id for output in engine_runner.outputs for each in output.scheduled)


def run(work: Awaitable[T]) -> T:
    """asyncio.run with a bound, so that a test that would hang fails."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, BOUND_SECONDS)

    return asyncio.run(bounded())
