"""The end of a server: what is running may end, what has not begun is refused."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

READING_METHODS = ("GET", "HEAD", "OPTIONS")


class Drain:
    """Whether the server still takes requests. begin() once, in the event loop."""

    def __init__(self) -> None:
        self.begun = False
        self._uploads: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Take no more requests; those whose body is still on its way are refused now."""
        self.begun = True
        for upload in self._uploads:
            upload.reschedule(0.0)

    async def receive(self, receive: Receive) -> Message:
        """A part of a body. Raises HTTPException (503) once the server takes no more requests."""
        with contextlib.suppress(TimeoutError):  # of begin(), and what follows says so
            if not self.begun:
                async with asyncio.timeout(None) as upload:
                    self._uploads.add(upload)
                    try:
                        return await receive()
                    finally:
                        self._uploads.discard(upload)
        raise HTTPException(503, "the server is shutting down", {"Retry-After": "1"})


class DrainGate:
    """ASGI middleware: a body that a client has not sent in full holds up no shutdown."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in READING_METHODS:
            await self.app(scope, receive, send)
            return
        is_complete = False

        async def guarded() -> Message:
            nonlocal is_complete
            if is_complete:
                return await receive()
            message = await self.drain.receive(receive)
            is_complete = not message.get("more_body", False)
            return message

        await self.app(scope, guarded, send)
