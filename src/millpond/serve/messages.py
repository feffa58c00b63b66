"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from millpond.core.request import FinishReason
from millpond.engine.call import Call, EngineRequest
from millpond.engine.outputs import RequestOutput
from millpond.serve.context import ServeContext, respond, with_headers
from millpond.serve.errors import AnthropicErrorBody, anthropic_body, describe, described
from millpond.serve.messages_protocol import CountTokensRequest, MessagesRequest
from millpond.serve.single import outputs_of, take_chat, whole_answer
from millpond.serve.sse import EventStream, EventTemplate, named_event

COUNTED = described(400, 401, 404, 413, 503, 504, body=AnthropicErrorBody)
STREAMED = described(400, 401, 404, 413, 429, 503, 504, streams=True, body=AnthropicErrorBody)


def messages_router(context: ServeContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", response_model=None, responses=STREAMED)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        return await respond(context, body, request.receive, _answer)

    @router.post("/v1/messages/count_tokens", response_model=None, responses=COUNTED)
    async def count_tokens(body: CountTokensRequest) -> Response:
        warnings = context.warnings(body)
        context.model_name(body.model)
        translation = body.translation()
        with translation.naming():
            token_ids = await context.chat(translation.conversation())
        return with_headers(JSONResponse({"input_tokens": len(token_ids)}), warnings)

    return router


async def _answer(context: ServeContext, body: MessagesRequest) -> Response:
    model = context.model_name(body.model)
    call = await take_chat(context, f"msg_{context.new_id()}", body.translation())
    if body.stream:
        release = partial(context.engine.release, call)
        return EventStream(_events(context, model, call), release, ending=b"", failure=_failure)
    (request,) = call.requests
    text, last = await whole_answer(context, call)
    return JSONResponse(_message(model, request, [_text_block(text)], _usage(last), _end(last)))


async def _events(context: ServeContext, model: str, call: Call) -> AsyncGenerator[bytes]:
    """The message begins before its first token is there, and has one block of text, which may stay empty. What of the
    prompt was found in the prefix cache is known in the end."""
    (request,) = call.requests
    usage = _counts(len(request.prompt_token_ids), 0, 0)
    begun = _message(model, request, [], usage, {"stop_reason": None, "stop_sequence": None})
    yield named_event({"type": "message_start", "message": begun})
    yield named_event({"type": "content_block_start", "index": 0, "content_block": _text_block("")})
    text_event = EventTemplate(_text_delta, named_event)
    async with aclosing(outputs_of(context, call)) as outputs:
        async for output in outputs:
            if output.text:
                yield text_event(output.text)
    yield named_event({"type": "content_block_stop", "index": 0})
    yield named_event({"type": "message_delta", "delta": _end(output), "usage": _usage(output)})
    yield named_event({"type": "message_stop"})


def _failure(error: Exception) -> bytes:
    return named_event(anthropic_body(*describe(error)))


def _message(
    model: str, request: EngineRequest, content: list[dict[str, Any]], usage: dict[str, int], end: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **end,
        "usage": usage,
    }


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _text_delta(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


def _end(last: RequestOutput) -> dict[str, Any]:
    """Why the answer ended."""
    if last.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_string}
    reason = "max_tokens" if last.finish_reason is FinishReason.LENGTH else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(last: RequestOutput) -> dict[str, int]:
    return _counts(last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens)


def _counts(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """In Anthropic's shape input_tokens are those of the prompt that were not found in a cache."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }
