"""A load client for completions that must all go well: one that fails ends the load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from millpond.lab.http_client import EventReader, Server, exchange
from millpond.lab.workload import WorkloadRequest

HOST = "127.0.0.1"
MOST_SECONDS = 600.0  # for a whole load


class ServerAnswer(Exception):
    """A server said something else than a completion; the text says what."""


@dataclass(slots=True)
class Timeline:
    """What one request saw, in seconds from the start of the load: when it was due, and each piece of text."""

    due: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ttft(self) -> float:
        """From when it was due, not from when the client came round to sending it."""
        return self.pieces[0] - self.due

    @property
    def seconds_per_token(self) -> float:
        """From the first piece to the last, over the tokens after the first: whatever pieces came late or together."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.pieces)]


def _take(timeline: Timeline, event: Mapping[str, Any], now: float) -> None:
    if "error" in event:
        raise ServerAnswer(str(event["error"])[:300])
    if event.get("choices") and event["choices"][0].get("text"):
        timeline.pieces.append(now)
    if event.get("usage"):
        timeline.tokens = event["usage"]["completion_tokens"]


def completion_body(request: WorkloadRequest, model: str, extra: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """A greedy completion of token ids that takes exactly max_tokens."""
    body = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        **extra,
    }
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


async def _answer(server: Server, body: Mapping[str, Any], *, stream: bool) -> list[tuple[bytes, float]]:
    """The data of each event of an answer, or the whole of a plain one, and the loop's time when it came."""
    found: list[tuple[bytes, float]] = []
    reader = EventReader()

    def on_body(data: bytes, now: float) -> None:
        found.extend((each, now) for each in (reader.feed(data) if stream else [data]))

    message = server.message("POST", "/v1/completions", json.dumps(body, separators=(",", ":")).encode())
    over = await exchange(server, message, on_body)
    try:
        await over.done
    finally:
        over.hang_up()
    if not over.status:
        raise ServerAnswer("it closed the connection without an answer")
    if over.status != 200:
        raise ServerAnswer(f"status {over.status}: {over.error_body[:300].decode(errors='replace')}")
    if not over.is_whole:
        raise ServerAnswer(f"it did not end its answer: {over.fault}")
    if not found:
        raise ServerAnswer("a 200 with nothing in it")
    return found if stream else [(b"".join(data for data, _ in found), found[-1][1])]


async def _one(
    server: Server, request: WorkloadRequest, body: Mapping[str, Any], start: float, stream: bool
) -> Timeline:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(max(0.0, start + request.arrival - clock()))
    timeline = Timeline(request.arrival)
    for event, now in await _answer(server, body, stream=stream):
        if event != b"[DONE]":
            _take(timeline, json.loads(event), now - start)
    if timeline.tokens != request.max_tokens:
        raise ServerAnswer(f"{timeline.tokens} tokens came where {request.max_tokens} were asked for")
    if not timeline.pieces:
        timeline.pieces.append(clock() - start)  # all its tokens together made no printable text
    return timeline


@dataclass(frozen=True, slots=True)
class LoadResult:
    """seconds from the first request due to the last byte read."""

    seconds: float
    timelines: tuple[Timeline, ...]

    def as_sample(self) -> dict[str, Any]:
        """Raw figures for the record: totals, and every TTFT and gap in seconds."""
        return {
            "seconds": self.seconds,
            "tokens": sum(each.tokens for each in self.timelines),
            "ttft": [round(each.ttft, 5) for each in self.timelines],
            "tpot": [round(each.seconds_per_token, 5) for each in self.timelines],
            "itl": [round(gap, 5) for each in self.timelines for gap in each.gaps],
        }


def load(
    port: int, requests: Sequence[WorkloadRequest], model: str, extra: Mapping[str, Any], *, stream: bool
) -> LoadResult:
    """Send every request when it is due, and wait for all. Raises ServerAnswer or OSError (TimeoutError too) for the
    first that fails."""
    server = Server(HOST, port)
    bodies = [completion_body(request, model, extra, stream=stream) for request in requests]

    async def all_of_them() -> LoadResult:
        clock = asyncio.get_running_loop().time
        start = clock() + 0.01
        async with asyncio.timeout(MOST_SECONDS), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_one(server, request, body, start, stream))
                for request, body in zip(requests, bodies, strict=True)
            ]
        return LoadResult(clock() - start, tuple(task.result() for task in tasks))

    try:
        return asyncio.run(all_of_them())
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
