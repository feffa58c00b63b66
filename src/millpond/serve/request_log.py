"""Request ids and the access log: one line when a request has ended, however it ended."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.engine.timeline import Summary

logger = logging.getLogger("millpond.access")

SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Asked for every few seconds by machines: their lines would bury the others.
QUIET_PATHS = ("/health", "/ready", "/metrics")
MAX_PATH_CHARACTERS = 200
MAX_LOGGED_BODY_BYTES = 65536
CLIENT_CLOSED_REQUEST = 499  # what nginx writes for a client that went away


@dataclass(frozen=True, slots=True)
class RequestId:
    """The id that a request's header, errors and log lines carry; is_taken_over where the client chose it.

    engine_ids are those of the engine's requests that it came to.
    """

    text: str
    is_taken_over: bool
    engine_ids: list[str] = field(default_factory=list, compare=False)

    def answer_id(self, new_id: Callable[[], str]) -> str:
        """The id of this request's answer: its own, made unique where a client may send it twice."""
        return f"{self.text}-{new_id()}" if self.is_taken_over else self.text


REQUEST_ID: ContextVar[RequestId | None] = ContextVar("request_id", default=None)


def current_request_id() -> str | None:
    """The id of the request that is being handled here, if there is one."""
    current = REQUEST_ID.get()
    return None if current is None else current.text


def shown_path(path: str) -> str:
    """A path as a log may hold it: on one line, and not endless."""
    return path[:MAX_PATH_CHARACTERS].encode("unicode_escape").decode()


class RequestLog:
    """ASGI middleware, outermost of ours. HEAD is answered as GET, whose body the server then leaves out.

    responses counts answers by route and status; paths that are no route are one, so that no client can grow it. The
    line of a request that took slow_request seconds says what it waited for, which summarize knows by the engine's ids.
    """

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[], str],
        responses: Counter[tuple[str, int]],
        summarize: Callable[[Sequence[str]], Summary | None],
        slow_request: float,
        log_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self._new_id = new_id
        self._responses = responses
        self._summarize = summarize
        self._slow_request = slow_request
        self._log_prompts = log_prompts
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = self._request_id(scope)
        REQUEST_ID.set(request_id)
        header = (b"x-request-id", request_id.text.encode())
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        status, started = CLIENT_CLOSED_REQUEST, self._clock()
        body = Body(receive) if self._log_prompts else None

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self.app(inner, body or receive, noting)
        except Exception:
            status = 500
            raise
        finally:
            self._note(scope, inner, status, self._clock() - started, request_id.engine_ids)
            if body is not None and body.content:
                logger.info("body: %s", json.dumps(body.content.decode("utf-8", "replace")))

    def _request_id(self, scope: Scope) -> RequestId:
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        if len(given) == 1 and SANE_ID.fullmatch(given[0]):
            return RequestId(given[0].decode(), True)
        return RequestId(self._new_id(), False)

    def _note(self, scope: Scope, inner: Scope, status: int, seconds: float, engine_ids: Sequence[str]) -> None:
        route = getattr(inner.get("route"), "path", "other")
        self._responses[route, status] += 1
        method, path = scope["method"], shown_path(scope["path"])
        fields: dict[str, Any] = {
            "method": method,
            "path": path,
            "status": status,
            "duration_seconds": round(seconds, 6),
            "client": scope["client"] and scope["client"][0],
        }
        why = ""
        is_slow = bool(engine_ids) and seconds >= self._slow_request
        if is_slow and (summary := self._summarize(engine_ids)) is not None:
            fields |= summary.rounded()
            why = f": {summary.text}"
        level = logging.DEBUG if scope["path"] in QUIET_PATHS and status < 400 else logging.INFO
        logger.log(level, "%s %s %d in %.3f s%s", method, path, status, seconds, why, extra={"fields": fields})


class Body:
    """A receive that keeps the beginning of what came through it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.content = b""

    async def __call__(self) -> Message:
        message = await self._receive()
        self.content += message.get("body", b"")[: MAX_LOGGED_BODY_BYTES - len(self.content)]
        return message
