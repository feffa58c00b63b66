"""One streamed completion as a client sees it: when it was due and left, when its pieces of text came, how it ended."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from millpond.lab.http_client import EventReader, Exchange, Server, exchange
from millpond.lab.latency import RequestTimes

DONE = b"[DONE]"
# After its last event a stream needs a moment to end by itself; a server that forgets to is not waited for.
FAREWELL_SECONDS = 1.0
BAD_REASONS = ("error", "abort")
SHOWN = 300  # characters of a server's message that are kept

# The kinds of error besides http_<status>.
CONNECT, TIMEOUT, CUT, ERROR_EVENT, NO_STREAM = "connect", "timeout", "cut", "error_event", "no_stream"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load: when it is due (seconds from the start), its size as it was asked for, and its body."""

    due: float
    prompt_tokens: int
    max_tokens: int
    body: bytes = field(repr=False)


@dataclass(slots=True)
class LoadRecord:
    """What became of a request. Times are in seconds from the start of the load; pieces has one for each piece of text.

    error is None, or its kind: connect, timeout, cut (the stream ended before the answer did), error_event, no_stream
    (a 200 that is not a stream of completions), or http_ and a status. usage is None where the server counted nothing.
    """

    index: int
    due: float
    prompt_tokens: int
    max_tokens: int
    started: float
    sent: float | None = None
    ended: float = 0.0
    pieces: array[float] = field(default_factory=lambda: array("d"), repr=False)
    usage: dict[str, int] | None = None
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""
    retry_after: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def output_tokens(self) -> int:
        """By the server's usage; without one, the pieces of text, which may hold several tokens each."""
        return len(self.pieces) if self.usage is None else self.usage["completion_tokens"]

    @property
    def times(self) -> RequestTimes:
        """Counted from when it was due, not from when this client came round to sending it. For what has pieces."""
        return RequestTimes(self.due, self.pieces[0], self.pieces[-1], self.output_tokens)

    @property
    def gaps(self) -> list[float]:
        """Seconds from each piece of text to the next; pieces that came together have none between."""
        return [after - before for before, after in pairwise(self.pieces)]

    def as_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "due": self.due,
            "started": self.started,
            "sent": self.sent,
            "ended": self.ended,
            "pieces": [round(each, 6) for each in self.pieces],
            "asked": {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens},
            "usage": self.usage,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "message": self.message,
            "retry_after": self.retry_after,
        }


class StreamedAnswer:
    """Fills a record from the body of a stream. origin is the loop's time at the start of the load.

    on_done is called with the loop's time when the event comes that ends every stream.
    """

    def __init__(self, record: LoadRecord, origin: float) -> None:
        self.on_done: Callable[[float], None] = lambda now: None
        self._record = record
        self._origin = origin
        self._events = EventReader()
        self._body_start = b""
        self.is_done = False

    def feed(self, data: bytes, now: float) -> None:
        self._body_start = self._body_start or data[:SHOWN]
        for event in self._events.feed(data):
            self._take(event, now - self._origin)

    def end(self, now: float) -> None:
        """The body has come to its end."""
        for event in self._events.end():
            self._take(event, now - self._origin)
        record = self._record
        if not record.pieces or (record.finish_reason is None and not self.is_done):
            self.fail(*self._unfinished())

    def _unfinished(self) -> tuple[str, str]:
        if self._record.pieces:
            return CUT, f"the stream ended after {len(self._record.pieces)} pieces of text, with no finish_reason"
        return NO_STREAM, f"a 200 without an event of a completion: {self._body_start.decode(errors='replace')!r}"

    def fail(self, kind: str, message: str) -> None:
        """The first failure is the one that counts."""
        if self._record.error is None:
            self._record.error, self._record.message = kind, message[:SHOWN]

    def _take(self, event: bytes, now: float) -> None:
        record = self._record
        if event == DONE:
            self.is_done = True
            self.on_done(now + self._origin)
            return
        try:
            found = json.loads(event)
            choices, usage = found.get("choices"), found.get("usage")
            if found.get("error") or found.get("object") == "error":
                self.fail(ERROR_EVENT, json.dumps(found.get("error") or found, ensure_ascii=False))
            elif choices:
                reason = choices[0].get("finish_reason")
                if reason in BAD_REASONS:
                    self.fail(ERROR_EVENT, f"the answer ended with finish_reason {reason!r}")
                # An answer may have no text at all: then its end is the first that there is to see.
                if has_text(choices[0]) or (reason and not record.pieces):
                    record.pieces.append(now)
                record.finish_reason = reason or record.finish_reason
            if usage:
                record.usage = {name: int(usage[name]) for name in ("prompt_tokens", "completion_tokens")}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.fail(NO_STREAM, f"not an event of a completion: {event[:SHOWN].decode(errors='replace')!r}")


def has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of an event brings some of the answer: its text, in a chat also its reasoning or a tool call."""
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal"))


@dataclass(frozen=True, slots=True)
class LoadClient:
    """Where requests go, and how long each may take from when it starts, in seconds."""

    server: Server
    route: str
    timeout: float

    async def send(self, index: int, request: LoadRequest, due: float, origin: float) -> LoadRecord:
        """Send a request and read its answer; what fails is recorded.

        due is in seconds from origin, a time of the loop.
        """
        clock = asyncio.get_running_loop().time
        record = LoadRecord(index, due, request.prompt_tokens, request.max_tokens, clock() - origin)
        answer = StreamedAnswer(record, origin)
        open_exchange: Exchange | None = None
        try:
            async with asyncio.timeout(self.timeout) as limit:
                answer.on_done = lambda now: limit.reschedule(now + FAREWELL_SECONDS)
                message = self.server.message("POST", self.route, request.body)
                open_exchange = await exchange(self.server, message, answer.feed)
                await open_exchange.done
        except TimeoutError as error:  # of ours, or of the system's while connecting
            if not answer.is_done:
                answer.fail(TIMEOUT, str(error) or f"not over {self.timeout:g} seconds after it started")
        except OSError as error:
            answer.fail(CONNECT, str(error))
        record.ended = clock() - origin
        if open_exchange is not None:
            open_exchange.hang_up()
            record.sent = None if open_exchange.sent is None else open_exchange.sent - origin
            _close(record, answer, open_exchange, clock())
        return record


def _close(record: LoadRecord, answer: StreamedAnswer, over: Exchange, now: float) -> None:
    """How an exchange that is over ended, unless that is known."""
    if over.status not in (0, 200):
        record.retry_after = over.headers.get("retry-after")
        answer.fail(f"http_{over.status}", over.error_body.decode(errors="replace"))
    elif over.is_whole:
        answer.end(now)
    elif not answer.is_done:
        answer.fail(CUT, over.fault or "")
