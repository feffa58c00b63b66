"""A server on a virtual loop that does what a test says, and writes down when: its delays are known to the digit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

URL = "http://stand-in:8000"
DONE = b"data: [DONE]\n\n"

# What a server does with one request: seconds to wait, bytes to send, or the end of the connection.
Step = float | bytes | None


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def piece(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


def head(status: str = "200 OK", kind: str = "text/event-stream", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", "Transfer-Encoding: chunked", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


END = chunk(b"")


def refusal(status: str, message: str, **headers: str) -> list[Step]:
    return [head(status, "application/json", **headers) + chunk(json.dumps({"error": message}).encode()) + END]


def prompt_of(body: dict[str, Any]) -> Any:
    return body["prompt"] if "prompt" in body else body["messages"][-1]["content"]


def tokens_of(prompt: str | list[int]) -> int:
    """A word is two tokens, and a text has three more; ids are what they are."""
    return len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split()) + 3


@dataclass
class StandIn:
    """Each answer takes `first` seconds to its first token and `gap` to each later one; slots answers run at once.

    script has, by the number of the request, what is done in place of that. takes gets a body and returns a refusal or
    None. starts has when each request was taken up, sent when each of its pieces of text went out, both by number.
    """

    first: float = 0.5
    gap: float = 0.125
    slots: int = 1000
    with_usage: bool = True
    takes: Callable[[dict[str, Any]], list[Step] | None] = lambda body: None
    script: dict[int, Sequence[Step]] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    sent: dict[int, list[float]] = field(default_factory=dict)
    hung_up: list[int] = field(default_factory=list)
    _slot: asyncio.Semaphore | None = None

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text = (await reader.readuntil(b"\r\n\r\n")).decode()
        if text.startswith("GET /v1/models"):
            writer.write(head(kind="application/json") + chunk(b'{"data": [{"id": "m"}, {"id": "other"}]}') + END)
            return
        length = int(text.lower().split("content-length:")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        number = len(self.bodies)
        self.heads.append(text)
        self.bodies.append(body)
        self.came.append(asyncio.get_running_loop().time())
        self._slot = self._slot or asyncio.Semaphore(self.slots)
        async with self._slot:
            steps = self.takes(body) or self.script.get(number) or self.answer(body)
            with contextlib.suppress(ConnectionError):
                await self._carry_out(number, steps, writer)

    async def _carry_out(self, number: int, steps: Sequence[Step], writer: asyncio.StreamWriter) -> None:
        times = self.sent.setdefault(number, [])
        for step in steps:
            if step is None:
                return
            if isinstance(step, bytes):
                if b'"text"' in step or b'"content"' in step:
                    times.append(asyncio.get_running_loop().time())
                writer.write(step)
                await writer.drain()
            else:
                await asyncio.sleep(step)

    def answer(self, body: dict[str, Any]) -> list[Step]:
        """What is done with a request that nothing else is said about: max_tokens pieces of text."""
        last = body["max_tokens"] - 1
        steps: list[Step] = [head(), self.first]
        for index in range(last + 1):
            steps += [chunk(self.piece(body, index, last)), self.gap]
        counts = tokens_of(prompt_of(body)), last + 1
        asked = self.with_usage and "stream_options" in body
        return [*steps[:-1], *([chunk(usage(*counts))] if asked else []), chunk(DONE) + END]

    def piece(self, body: dict[str, Any], index: int, last: int) -> bytes:
        reason = "length" if index == last else None
        if "prompt" in body:
            return piece(f" {index}", reason)
        return event({"choices": [{"index": 0, "delta": {"content": f" {index}"}, "finish_reason": reason}]})
