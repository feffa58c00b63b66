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
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        number = self._admits(scope)
        if not number:
            body = error_body(
                "this server wants an API key that it knows, and one only, sent as Authorization: Bearer KEY",
                "invalid_request_error",
                code="invalid_api_key",
            )
            response = error_response(scope["path"], 401, body, {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        API_KEY.set(number)
        await self.app(scope, receive, send)

    def _admits(self, scope: Scope) -> int:
        """Which of the keys was shown, from 1 on; 0 for none."""
        given = [key for name, value in scope["headers"] if (key := _key(name, value)) is not None]
        if len(given) != 1:  # several would leave open whose request it is
            return 0
        digest = _digest(given[0])
        # Every key is compared in full, so that the time tells nothing of how close one came, nor to which.
        return max([number * hmac.compare_digest(digest, each) for number, each in enumerate(self._digests, 1)])


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
