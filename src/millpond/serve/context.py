"""What the routes share."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi.responses import Response
from starlette.types import Receive

from millpond.engine.async_engine import AsyncEngine
from millpond.engine.call import Call, EngineRequest
from millpond.engine.timeline import Origin
from millpond.errors import InvalidRequestError, ModelNotFoundError
from millpond.serve.disconnect import while_connected
from millpond.serve.drain import Drain
from millpond.serve.intake import Intake
from millpond.serve.protocol import Body, Conversation
from millpond.serve.request_log import REQUEST_ID
from millpond.serve.sse import EventStream
from millpond.serve.tenants import API_KEY, tenant_of

B = TypeVar("B", bound=Body)

WARNING_HEADER = "X-Millpond-Warning"
NAMED_FIELDS = 10


class Terms(Protocol):
    """What a body may say beside what it wants."""

    timeout: float | None
    deadline_ms: int | None
    priority: int | None
    user: str | None


@dataclass(frozen=True, slots=True)
class ServeContext:
    """model_names are served names of the one model; the first is the one that answers carry."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    intake: Intake
    now: Callable[[], float]
    new_id: Callable[[], str]
    started: int
    drain: Drain
    strict: bool = False

    def terms(self, body: Terms) -> dict[str, Any]:
        """What an EngineRequest has of a body beside its sampling. InvalidRequestError for a tenant that is no name."""
        terms = {"timeout": body.timeout, "deadline_ms": body.deadline_ms, "priority": body.priority or 0}
        return {**terms, "tenant": tenant_of(body.user)} if self.engine.limits.policy == "fair" else terms

    def model_name(self, wanted: str | None) -> str:
        """The served name that a request asks for. Raises ModelNotFoundError."""
        if wanted is None:
            return self.model_names[0]
        if wanted not in self.model_names:
            served = ", ".join(self.model_names)
            raise ModelNotFoundError(f"there is no model {wanted[:100]!r} here; this server has {served}")
        return wanted

    async def chat(self, conversation: Conversation, timeout: float | None = None) -> list[int]:
        """Token ids of a conversation, in the time that a request has. Raises what Intake.chat does, and
        RequestTimeoutError."""
        async with self.engine.in_time(timeout):
            return await self.intake.chat(conversation)

    def take(self, answer_id: str, requests: Sequence[EngineRequest]) -> Call:
        """Queue the requests of one answer, whose timelines are found by its id and by that of the HTTP request, too.

        Raises what AsyncEngine.take does.
        """
        current = REQUEST_ID.get()
        names = (answer_id,) if current is None else (answer_id, current.text)
        call = self.engine.take(requests, Origin(names, API_KEY.get()))
        if current is not None:
            current.engine_ids.extend([each.request_id for each in requests])
        return call

    def warnings(self, body: Body) -> dict[str, str]:
        """The header that names the fields of a body that nobody knows, none for most. A strict server refuses them:
        raises InvalidRequestError naming the first."""
        unknown = [path[:100] for path in body.unknown_fields()]
        if not unknown:
            return {}
        if self.strict:
            raise InvalidRequestError(f"unknown field {unknown[0]}: this server was started with --strict", unknown[0])
        # A field's name may hold anything, a header only ASCII on one line.
        named = ", ".join(json.dumps(path)[1:-1] for path in unknown[:NAMED_FIELDS])
        more = f" and {len(unknown) - NAMED_FIELDS} more" if len(unknown) > NAMED_FIELDS else ""
        return {WARNING_HEADER: f"unknown fields were ignored: {named}{more}"}


def with_headers(response: Response, headers: Mapping[str, str]) -> Response:
    response.headers.update(headers)
    return response


async def respond(
    context: ServeContext,
    body: B,
    receive: Receive,
    answer: Callable[[ServeContext, B], Coroutine[Any, Any, Response]],
) -> Response:
    """The answer to a body, while its client is there, with the header that names unknown fields. Raises ClientGone,
    what answer raises, and InvalidRequestError for an unknown field where the server is strict."""
    warnings = context.warnings(body)
    return with_headers(await while_connected(receive, answer(context, body), EventStream.release_unsent), warnings)
