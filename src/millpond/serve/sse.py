"""Server-sent events: `data: {...}` and an empty line. OpenAI's older shapes end with `data: [DONE]`."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millpond.errors import MillpondError
from millpond.serve.disconnect import ClientGone, while_connected
from millpond.serve.errors import describe

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def data_event(payload: Mapping[str, Any]) -> bytes:
    """One event on one data line: escaped to ASCII, JSON holds nothing that any client takes for a line's end."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def named_event(payload: Mapping[str, Any]) -> bytes:
    """The same, named by the payload's type as Anthropic's clients and those of OpenAI's responses read it."""
    return b"event: %b\n%b" % (payload["type"].encode(), data_event(payload))


def error_event(error: Exception) -> bytes:
    return data_event(describe(error)[1])


class EventTemplate:
    """The events of payloads that differ in one text alone: encode(payload(text)), for a fifth of the time.

    Nothing that the payload puts behind the text may be a caller's own.
    """

    __slots__ = ("_after", "_before")

    def __init__(
        self, payload: Callable[[str], Mapping[str, Any]], encode: Callable[[Mapping[str, Any]], bytes] = data_event
    ) -> None:
        mark = "\0text\0"
        self._before, _, self._after = encode(payload(mark)).rpartition(json.dumps(mark).encode())

    def __call__(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, encode_basestring_ascii(text).encode(), self._after)


class EventStream(Response):
    """A 200 whose events are still to come, and last the ending. Once it has begun, a failure is the event that
    `failure` makes of it, and the end.

    The generator is closed when the client hangs up; release is called at the end in any case, even before a beginning.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        release: Callable[[], None],
        *,
        ending: bytes = DONE,
        failure: Callable[[Exception], bytes] = error_event,
    ) -> None:
        # No super().__init__: it would count the length of a body that does not exist yet.
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self.release = release
        self._ending = ending
        self._failure = failure

    @staticmethod
    def release_unsent(response: Response) -> None:
        """What an answer that will not be sent holds, where it is a stream."""
        if isinstance(response, EventStream):
            response.release()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._stream(send))
        except ClientGone:
            logger.debug("the client of %s hung up", scope["path"])
        finally:
            self.release()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events):
            last = await self._send_all(send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send) -> bytes:
        """Send every event; returns how the stream ends. After an error it does not end as a good one does."""
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not isinstance(error, MillpondError):
                logger.exception("a stream failed")
            return self._failure(error)
        return self._ending
