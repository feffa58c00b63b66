"""What the server says about itself: /, /health, /ready, /version and /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from millpond.serve.context import ServeContext
from millpond.serve.errors import described
from millpond.serve.responses import model_card
from millpond.version import __version__

WORTH_A_TRY = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/metrics",
    "/health",
    "/version",
)


def meta_router(context: ServeContext) -> APIRouter:
    router = APIRouter()

    def card(model_id: str) -> dict[str, Any]:
        return model_card(model_id, context.started, context.engine.limits.max_total_tokens)

    @router.get("/", responses=described(401))
    async def welcome() -> dict[str, Any]:
        return {
            "millpond": __version__,
            "what": "an OpenAI-compatible language model server",
            "models": list(context.model_names),
            "try": list(WORTH_A_TRY),
            "docs": "/docs",
        }

    @router.get("/health", response_model=None, responses={503: {"description": "Not serving, and why."}})
    async def health() -> Response:
        if (trouble := context.engine.trouble) is not None:
            return JSONResponse({"status": "unhealthy", "reason": trouble}, 503)
        return JSONResponse({"status": "ok", **_last_step(context)})

    @router.get("/ready", response_model=None, responses={503: {"description": "Not serving, or about to stop."}})
    async def ready() -> Response:
        if context.drain.begun:
            return JSONResponse({"status": "draining"}, 503)
        if not context.engine.is_healthy:
            return JSONResponse({"status": "not serving"}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/version", responses=described(401))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/v1/models", responses=described(401))
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in context.model_names]}

    @router.get("/v1/models/{model_id:path}", responses=described(401, 404))
    async def get_model(model_id: str) -> dict[str, Any]:
        return card(context.model_name(model_id))

    return router


def _last_step(context: ServeContext) -> dict[str, int]:
    """How far the engine has come, so that two looks at /health show progress."""
    last = context.engine.last_step
    if last is None:
        return {"steps": 0, "running": 0, "waiting": 0}
    return {"steps": last.step + 1, "running": last.num_running, "waiting": last.num_waiting}
