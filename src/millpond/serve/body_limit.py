"""Bounds on a request's body, before any of it is parsed."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: 413 for a body longer than max_bytes, announced or not, or with more than max_items commas.

    Between two commas is an item of a list or an object, or text. The parser and the checks of a body hold the event
    loop, and take a hundred times as long for items as for as many bytes of text.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_items: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_items = max_items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = _announced(scope)
        received = num_items = 0

        async def counted() -> Message:
            nonlocal received, num_items
            if announced <= self.max_bytes:
                message = await receive()
                body = message.get("body", b"")
                received += len(body)
                num_items += body.count(b",")
            if max(announced, received) > self.max_bytes:
                raise HTTPException(413, f"the body is longer than {self.max_bytes} bytes")
            if num_items > self.max_items:
                raise HTTPException(413, f"the body has more than {self.max_items} items: its commas are counted")
            return message

        await self.app(scope, counted, send)


def _announced(scope: Scope) -> int:
    """The Content-Length, 0 where there is none; a malformed one does not come through the HTTP parser."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
