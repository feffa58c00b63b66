"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from millpond.engine.call import Call, EngineRequest
from millpond.serve.context import ServeContext
from millpond.serve.disconnect import while_connected
from millpond.serve.generation import renaming, with_usage
from millpond.serve.protocol import ChatCompletionRequest
from millpond.serve.responses import ChoiceText, Envelope, Tally, chat_choice, chat_delta, reason_of
from millpond.serve.sse import EventStream, EventTemplate, data_event


def chat_router(context: ServeContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        return await while_connected(request.receive, _answer(context, body), EventStream.release_unsent)

    return router


async def _answer(context: ServeContext, body: ChatCompletionRequest) -> Response:
    envelope = Envelope(
        f"chatcmpl-{context.new_id()}", "chat.completion", int(context.now()), context.model_name(body.model)
    )
    with renaming(body.engine_field_names()):
        sampling = body.sampling()
        context.engine.check_room(1, context.intake.least_chat_tokens(body.messages))
        prompt_token_ids = await context.intake.chat(body.messages)
        call = context.engine.take([EngineRequest(envelope.id, prompt_token_ids, sampling, body.timeout)])
    if body.stream:
        chunk = replace(envelope, kind="chat.completion.chunk")
        chunks = _chunks(context, chunk, call, body.include_usage)
        return EventStream(chunks, partial(context.engine.release, call))
    return JSONResponse(await _whole(context, envelope, call))


async def _whole(context: ServeContext, envelope: Envelope, call: Call) -> dict[str, Any]:
    tally, answer = Tally(), ChoiceText()
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for output in outputs:
            tally.note(output)
            answer.add(output)
    return {**envelope.wrap([chat_choice(answer.text, answer.finish_reason)]), "usage": tally.usage()}


async def _chunks(context: ServeContext, envelope: Envelope, call: Call, include_usage: bool) -> AsyncGenerator[bytes]:
    """The role once, before everything; the finish reason once, after everything and alone."""

    def payload(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return with_usage(envelope.wrap([chat_delta(delta, reason)]), include_usage)

    tally, text = Tally(), EventTemplate(lambda content: payload({"content": content}))
    begun = False
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for output in outputs:
            tally.note(output)
            reason = reason_of(output)
            if not begun:
                yield data_event(payload({"role": "assistant", "content": ""}))
                begun = True
            if output.text:
                yield text(output.text)
            if reason:
                yield data_event(payload({}, reason))
    if include_usage:
        yield data_event({**envelope.wrap([]), "usage": tally.usage()})
