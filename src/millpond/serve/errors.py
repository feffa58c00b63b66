"""Every error in the shape that the path's clients read: OpenAI's, {"error": {"message", "type", "param", "code"}},
and under /v1/messages Anthropic's, {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from millpond.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    MillpondError,
    ModelNotFoundError,
    OverloadedError,
    RequestNotFoundError,
    RequestTimeoutError,
    SlowReaderError,
)
from millpond.serve.request_log import CLIENT_CLOSED_REQUEST, current_request_id, shown_path

logger = logging.getLogger(__name__)

INTERNAL_MESSAGE = "internal error; the server's log has the details"
REQUEST_ID_HEADER = "X-Request-Id"
# A message may quote what was sent, and that may be a whole body.
MAX_MESSAGE_CHARACTERS = 1000

ANTHROPIC_PATH = "/v1/messages"
# What Anthropic's clients call a status; any other is an invalid_request_error, or from 500 on an api_error.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


# What the description of the API says of each status that a route may answer with.
MEANINGS = {
    400: "Something about the request cannot be served; `param` names the field.",
    401: "No API key, or none that the server knows.",
    404: "There is no such model or request, or nothing at this path.",
    413: "The body is longer than the server takes.",
    429: "The queue is full; Retry-After says when to try again.",
    503: "The server is shutting down, its engine is not well, or the answer could not be there by its deadline.",
    504: "The answer took longer than it may.",
}


class Error(BaseModel):
    """type is a kind of error; code, where there is one, says more exactly which it is."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    error: Error


class AnthropicError(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["error"]
    error: AnthropicError


def described(
    *statuses: int, streams: bool = False, body: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """What a route's description says of its answers beside the good one: these errors by name, any other as well.

    streams adds that the good one may be a stream of events.
    """
    # A model makes the framework compile it for each status of each route: more than half of making the app.
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": MEANINGS[status], "content": content} for status in statuses
    }
    responses["default"] = {"model": body, "description": "Any other error."}
    if streams:
        responses[200] = {"description": "The answer, whole or streamed.", "content": {"text/event-stream": {}}}
    return responses


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": _sendable(message), "type": kind, "param": param and _sendable(param), "code": code}}


def _sendable(text: str) -> str:
    """The beginning of a text. JSON may smuggle in half a surrogate pair, which no UTF-8 answer can repeat."""
    cut = text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[: MAX_MESSAGE_CHARACTERS - 3]}..."
    return cut.encode("utf-8", "replace").decode("utf-8")


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status code and body of an error. What is not MillpondError keeps its text to the log."""
    if isinstance(error, InvalidRequestError):
        return 400, error_body(str(error), "invalid_request_error", error.param)
    if isinstance(error, ModelNotFoundError):
        return 404, error_body(str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, RequestNotFoundError):
        return 404, error_body(str(error), "invalid_request_error", "request_id", "request_not_found")
    if isinstance(error, OverloadedError):
        return 429, error_body(str(error), error.bound, code="rate_limit_exceeded")
    if isinstance(error, DeadlineError):
        return 503, error_body(str(error), "server_error", "deadline_ms", "deadline_unreachable")
    if isinstance(error, RequestTimeoutError):
        return 504, error_body(str(error), "server_error", code=error.code)
    if isinstance(error, SlowReaderError):
        return 408, error_body(str(error), "invalid_request_error", code="slow_reader")
    if isinstance(error, EngineDeadError):
        return 503, error_body(str(error), "server_error", code="engine_dead")
    if isinstance(error, MillpondError):
        return 500, error_body(str(error), "server_error")
    request_id = current_request_id()
    where = f" of request {request_id}" if request_id else ""
    return 500, error_body(INTERNAL_MESSAGE + where, "server_error")


def anthropic_body(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """What error_body gives in Anthropic's shape, whose message has to name the field."""
    error = body["error"]
    message, param = error["message"], error["param"]
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    text = message if param is None or param in message else f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": text}}


def error_response(
    path: str, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The answer that says what error_body gave, in the shape of the path that was asked."""
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    return JSONResponse(anthropic_body(status, body) if is_anthropic else body, status, headers)


def failure_response(path: str, error: BaseException) -> JSONResponse:
    """The answer to a request that an error ended before the status line."""
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, OverloadedError) else None
    return error_response(path, *describe(error), headers)


def field_path(location: Sequence[int | str]) -> str | None:
    """("body", "messages", 0, "role") -> "messages[0].role"; None for the body as a whole."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])
    return path.removeprefix(".") or None


def validation_body(errors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first of pydantic's errors in OpenAI's shape."""
    first = errors[0]
    kind, location = first["type"], first["loc"]
    if kind == "json_invalid":
        reason = first["ctx"]["error"]
        return error_body(f"the body is not valid JSON: {reason} (character {location[-1]})", "invalid_request_error")
    param = field_path(location)
    if param is None:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    elif kind == "missing":
        message = f"{param} is required"
    elif kind == "extra_forbidden":
        message = f"unknown field {param}"
    else:
        message = f"{param}: {first['msg']}"
    return error_body(message, "invalid_request_error", param)


def _http_body(request: Request, error: HTTPException) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    if error.status_code == 404:
        return error_body(f"there is nothing at {request.method} {request.url.path[:200]}", kind, code="not_found")
    if error.status_code == 405:
        return error_body(f"{request.method} is not allowed at {request.url.path[:200]}", kind)
    if error.status_code == 400 and error.__cause__ is not None:
        # What FastAPI says of a body that breaks the JSON parser in another way than by its grammar.
        return error_body(f"the body is not valid JSON: {str(error.__cause__).split(';')[0]}", kind)
    return error_body(str(error.detail), kind)


def install_error_handlers(app: FastAPI) -> None:
    """Give every way in which a request can fail the one error shape."""

    async def on_millpond_error(request: Request, error: Exception) -> JSONResponse:
        return failure_response(request.url.path, error)

    async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(request.url.path, 400, validation_body(error.errors()))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ClientDisconnect):  # which FastAPI takes for a body that it cannot parse
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return error_response(request.url.path, error.status_code, _http_body(request, error), error.headers)

    async def on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, shown_path(request.url.path), exc_info=error)
        response = failure_response(request.url.path, error)
        # This one is sent from outside of everything that puts the header on the others.
        if request_id := current_request_id():
            response.headers[REQUEST_ID_HEADER] = request_id
        return response

    app.add_exception_handler(MillpondError, on_millpond_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_unexpected_error)
