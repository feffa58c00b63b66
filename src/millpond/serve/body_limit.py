"""A bound on the bytes of a request's body, before any of it is parsed."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: 413 for a body longer than max_bytes, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = _announced(scope)
        received = 0

        async def counted() -> Message:
            nonlocal received
            if announced <= self.max_bytes:
                message = await receive()
                received += len(message.get("body", b""))
            if max(announced, received) > self.max_bytes:
                raise HTTPException(413, f"the body is longer than {self.max_bytes} bytes")
            return message

        await self.app(scope, counted, send)


def _announced(scope: Scope) -> int:
    """The Content-Length, 0 where there is none; a malformed one does not come through the HTTP parser."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
