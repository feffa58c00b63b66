"""The ASGI application over an engine that somebody else starts and stops."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from millpond.config import ServerConfig
from millpond.engine.async_engine import AsyncEngine
from millpond.serve.auth import ApiKeys
from millpond.serve.body_limit import BodyLimit
from millpond.serve.chat import chat_router
from millpond.serve.completions import completions_router
from millpond.serve.context import WARNING_HEADER, ServeContext
from millpond.serve.disconnect import ClientGone
from millpond.serve.drain import Drain, DrainGate
from millpond.serve.embeddings import embeddings_router
from millpond.serve.errors import REQUEST_ID_HEADER, install_error_handlers
from millpond.serve.intake import Intake
from millpond.serve.messages import messages_router
from millpond.serve.meta import meta_router
from millpond.serve.metrics import EngineCollector, metrics_router
from millpond.serve.request_log import CLIENT_CLOSED_REQUEST, REQUEST_ID, RequestLog
from millpond.serve.requests import requests_router
from millpond.serve.responses_api import responses_router
from millpond.serve.tenants import TenantHeader
from millpond.serve.tokens import tokens_router
from millpond.text.chat import ChatTemplate
from millpond.text.tokenizer import Tokenizer
from millpond.version import __version__

# Of a body, beside the ids or words of its prompts.
OTHER_ITEMS = 65_536


def create_app(
    async_engine: AsyncEngine,
    *,
    model_names: Sequence[str],
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    config: ServerConfig = ServerConfig(),  # noqa: B008 (it cannot be changed)
    drain: Drain | None = None,
    now: Callable[[], float] = time.time,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> FastAPI:
    """The API over one model. async_engine must be started in the loop that serves the application.

    model_names are the names that a request may use; the first is the one that is shown. drain is begun by whoever
    stops the server.
    """
    drain = drain or Drain()

    def answer_id() -> str:
        request_id = REQUEST_ID.get()
        return new_id() if request_id is None else request_id.answer_id(new_id)

    context = ServeContext(
        engine=async_engine,
        model_names=tuple(model_names),
        intake=Intake.of(tokenizer, chat_template, async_engine.limits),
        now=now,
        new_id=answer_id,
        started=int(now()),
        drain=drain,
        strict=config.strict,
    )
    app = FastAPI(title="millpond", version=__version__)
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    responses: Counter[tuple[str, int]] = Counter()
    # A text has hardly more commas than tokens, and no body may have more tokens than these.
    most_tokens = max(async_engine.load.max_waiting_tokens, async_engine.limits.max_total_tokens)
    log = partial(
        RequestLog,
        new_id=new_id,
        responses=responses,
        summarize=async_engine.timelines.summary,
        slow_request=config.slow_request,
        log_prompts=config.log_prompts,
    )
    if async_engine.limits.policy == "fair":
        app.add_middleware(TenantHeader)
    _add_middleware(app, config, drain, most_tokens + OTHER_ITEMS)
    app.add_middleware(log)
    metrics = metrics_router(EngineCollector(async_engine.metrics, context.model_names[0], responses))
    makers = (completions_router, chat_router, messages_router, responses_router, tokens_router, embeddings_router)
    for router in (metrics, *(make_router(context) for make_router in (meta_router, requests_router, *makers))):
        app.router.routes += router.routes  # include_router would make each of them again
    return app


def _add_middleware(
    app: FastAPI,
    config: ServerConfig,
    drain: Drain,
    max_items: int,
) -> None:
    """What every request passes before a route and behind the log, innermost first."""
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, max_items=max_items)
    app.add_middleware(DrainGate, drain=drain)
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, WARNING_HEADER, "Retry-After"],
        )


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
