"""The ASGI application over an engine that somebody else starts and stops."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import Response

from millpond.engine.async_engine import AsyncEngine
from millpond.serve.body_limit import MAX_BODY_BYTES, BodyLimit
from millpond.serve.chat import chat_router
from millpond.serve.completions import completions_router
from millpond.serve.context import ServeContext
from millpond.serve.disconnect import ClientGone
from millpond.serve.errors import CLIENT_CLOSED_REQUEST, install_error_handlers
from millpond.serve.intake import Intake
from millpond.serve.meta import meta_router
from millpond.serve.tokens import tokens_router
from millpond.text.chat import ChatTemplate
from millpond.text.tokenizer import Tokenizer
from millpond.version import __version__


def create_app(
    async_engine: AsyncEngine,
    *,
    model_names: Sequence[str],
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    max_body_bytes: int = MAX_BODY_BYTES,
    strict: bool = False,
    now: Callable[[], float] = time.time,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> FastAPI:
    """The API over one model. async_engine must be started in the loop that serves the application.

    model_names are the names that a request may use; the first is the one that is shown. strict refuses fields that
    nobody knows, which otherwise are named in the header X-Millpond-Warning.
    """
    context = ServeContext(
        engine=async_engine,
        model_names=tuple(model_names),
        intake=Intake.of(tokenizer, chat_template, async_engine.limits),
        now=now,
        new_id=new_id,
        started=int(now()),
        strict=strict,
    )
    app = FastAPI(title="millpond", version=__version__)
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    for router in (meta_router(context), completions_router(context), chat_router(context), tokens_router(context)):
        app.include_router(router)
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
