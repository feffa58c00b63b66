"""Server-sent events: `data: {...}`, an empty line, and `data: [DONE]` after the last."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
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


class EventStream(Response):
    """A 200 whose events are still to come. Once it has begun, a failure is an event with an `error` object.

    The generator is closed, and so the request aborted, when the client hangs up.
    """

    media_type = "text/event-stream"

    def __init__(self, payloads: AsyncGenerator[Mapping[str, Any]]) -> None:
        # No super().__init__: it would count the length of a body that does not exist yet.
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._payloads = payloads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._stream(send))
        except ClientGone:
            logger.debug("the client of %s hung up", scope["path"])

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._payloads):
            last = await self._send_all(send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send) -> bytes:
        """Send every payload; returns how the stream ends. After an error it does not end as a good one does."""
        try:
            async for payload in self._payloads:
                await send({"type": "http.response.body", "body": data_event(payload), "more_body": True})
        except Exception as error:
            if not isinstance(error, MillpondError):
                logger.exception("a stream failed")
            return data_event(describe(error)[1])
        return DONE
