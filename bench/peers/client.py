"""A load client for streamed completions: plain asyncio sockets, since it shares the cores with what it measures.

A general HTTP library costs several times as much processor time for each streamed token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from millpond.lab.workload import WorkloadRequest

HOST = "127.0.0.1"
LIMIT = 1 << 22  # bytes of one line
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


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a chunked body."""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = await reader.readline()
    if not status_line:
        raise ServerAnswer("it closed the connection without an answer")
    headers = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return int(status_line.split()[1]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        async for chunk in _chunks(reader):
            yield chunk
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(1 << 16):
            yield data


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of an answer: of each server-sent event, or the one of a plain body."""
    status, headers = await _head(reader)
    is_stream = headers.get("content-type", "").startswith("text/event-stream")
    pending = b""
    async for data in _body(reader, headers):
        pending += data
        if status == 200 and is_stream:
            *lines, pending = pending.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield json.loads(line[5:])
    if status != 200:
        raise ServerAnswer(f"status {status}: {pending[:300].decode(errors='replace')}")
    if not is_stream:
        yield json.loads(pending)


def _take(timeline: Timeline, event: Mapping[str, Any], now: float) -> None:
    if "error" in event:
        raise ServerAnswer(str(event["error"])[:300])
    if event.get("choices") and event["choices"][0].get("text"):
        timeline.pieces.append(now)
    if event.get("usage"):
        timeline.tokens = event["usage"]["completion_tokens"]


async def post(port: int, path: str, body: Mapping[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(HOST, port, limit=LIMIT)
    data = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


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


async def _one(
    port: int, request: WorkloadRequest, body: Mapping[str, Any], start: float, clock: Any = time.perf_counter
) -> Timeline:
    await asyncio.sleep(max(0.0, start + request.arrival - clock()))
    timeline = Timeline(request.arrival)
    reader, writer = await post(port, "/v1/completions", body)
    try:
        async for event in events(reader):
            _take(timeline, event, clock() - start)
    finally:
        writer.close()
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
    bodies = [completion_body(request, model, extra, stream=stream) for request in requests]

    async def all_of_them() -> LoadResult:
        start = time.perf_counter() + 0.01
        async with asyncio.timeout(MOST_SECONDS), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_one(port, request, body, start))
                for request, body in zip(requests, bodies, strict=True)
            ]
        return LoadResult(time.perf_counter() - start, tuple(task.result() for task in tasks))

    try:
        return asyncio.run(all_of_them())
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
