"""API keys: who may ask."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from millpond.serve.errors import error_body, error_response
from millpond.serve.tenants import API_KEY

# What load balancers and supervisors look at, who have no key.
OPEN_PATHS = ("/health", "/ready")


class ApiKeys:
    """ASGI middleware: 401 for a request without one of the keys.

    A key comes as `Authorization: Bearer KEY`, or as `x-api-key: KEY` as Anthropic's clients send it.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = self._number(scope) if scope["type"] == "http" else 0
        API_KEY.set(number)
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not number:
            body = error_body(
                "this server wants an API key that it knows, and one only, sent as Authorization: Bearer KEY",
                "invalid_request_error",
                code="invalid_api_key",
            )
            response = error_response(scope["path"], 401, body, {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _number(self, scope: Scope) -> int:
        """Which of the keys a request brings, from 1 on; 0 for none of them."""
        given = [key for name, value in scope["headers"] if (key := _key(name, value)) is not None]
        if len(given) != 1:  # several would leave open whose request it is
            return 0
        digest = _digest(given[0])
        # Every key is compared in full, so that the time tells nothing of how close one came, nor to which.
        same = [hmac.compare_digest(digest, each) for each in self._digests]
        return same.index(True) + 1 if sum(same) else 0


def _key(name: bytes, value: bytes) -> bytes | None:
    if name == b"x-api-key":
        return value.strip()
    if name != b"authorization":
        return None
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    """Of one length whatever the key's, which compare_digest would tell by its time."""
    return hashlib.sha256(key).digest()
