"""The measuring loop of every worker: commands come as JSON lines on standard input, answers leave on the real
standard output. Standard library only, since it runs inside each engine's own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

# A prompt gets at least a token in a step, so after this many steps without progress nobody new will decode.
MOST_STEPS_BEFORE_DECODE = 2000


class Adapter(Protocol):
    """One engine's offline interface, brought to a common shape."""

    settings: dict[str, Any]

    def add(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Hand over one greedy request that ignores end tokens."""

    def step(self) -> int:
        """Run one step; how many output tokens it gave."""

    def unfinished(self) -> bool: ...

    def abort_all(self) -> None: ...


class MeasurementError(Exception):
    """What was asked cannot be measured with this engine; the text says why."""


def steps(adapter: Adapter) -> Iterator[int]:
    while adapter.unfinished():
        yield adapter.step()


def decode(adapter: Adapter, prompts: Sequence[Sequence[int]], num_steps: int) -> dict[str, Any]:
    """Seconds of num_steps steps in which every sequence gets one token, after one such step that is not counted."""
    for prompt in prompts:
        # The first sequences may decode while the last ones still prefill: they must not run out meanwhile.
        adapter.add(prompt, 4 * num_steps + len(prompts))
    waited = counted = 0
    start = 0.0
    for num_tokens in steps(adapter):
        if num_tokens == len(prompts) and not start:
            start = time.perf_counter()
        elif start and num_tokens == len(prompts):
            counted += 1
        elif start and counted:
            raise MeasurementError(f"a decode step gave {num_tokens} tokens to {len(prompts)} sequences")
        else:
            start, waited = 0.0, waited + 1
        if counted == num_steps or waited > MOST_STEPS_BEFORE_DECODE:
            break
    seconds = time.perf_counter() - start
    adapter.abort_all()
    if counted < num_steps:
        raise MeasurementError(f"only {counted} of {num_steps} steps gave all {len(prompts)} sequences a token")
    return {"seconds": seconds, "tokens": counted * len(prompts)}


def batch(adapter: Adapter, requests: Sequence[tuple[Sequence[int], int]]) -> dict[str, Any]:
    """Seconds from handing over all the requests to the last token, and how many output tokens there were."""
    start = time.perf_counter()
    for prompt, max_tokens in requests:
        adapter.add(prompt, max_tokens)
    num_tokens = sum(steps(adapter))
    seconds = time.perf_counter() - start
    wanted = sum(max_tokens for _, max_tokens in requests)
    if num_tokens != wanted:
        raise MeasurementError(f"{num_tokens} output tokens came where {wanted} were asked for")
    return {"seconds": seconds, "tokens": num_tokens}


def answer(adapter: Adapter, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command of the harness."""
    if command["op"] == "decode":
        return decode(adapter, command["prompts"], command["steps"])
    if command["op"] == "batch":
        return batch(adapter, command["requests"])
    raise MeasurementError(f"unknown op {command['op']!r}")


def serve(build: Callable[[dict[str, Any]], Adapter]) -> None:
    """Build the engine from the settings in argv[1] (JSON), say that it is ready, then answer until input ends.

    Whatever the engine prints goes to standard error, so that only answers are on standard output.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.perf_counter()
    adapter = build(json.loads(sys.argv[1]))
    ready = {"ready": True, "seconds": time.perf_counter() - begun, "settings": adapter.settings}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        try:
            reply = {"ok": answer(adapter, json.loads(line))}
        except MeasurementError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), file=answers, flush=True)
