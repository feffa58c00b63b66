"""POST /v1/completions: one choice for each prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from millpond.engine.call import Call, EngineRequest
from millpond.serve.context import ServeContext
from millpond.serve.disconnect import while_connected
from millpond.serve.generation import admissible, renaming, with_usage
from millpond.serve.intake import prompt_names
from millpond.serve.protocol import CompletionRequest
from millpond.serve.responses import ChoiceText, Envelope, Tally, completion_choice, reason_of
from millpond.serve.sse import EventStream, EventTemplate, data_event


def completions_router(context: ServeContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await while_connected(request.receive, _answer(context, body), EventStream.release_unsent)

    return router


async def _answer(context: ServeContext, body: CompletionRequest) -> Response:
    envelope = Envelope(
        f"cmpl-{context.new_id()}", "text_completion", int(context.now()), context.model_name(body.model)
    )
    sampling = body.sampling()
    context.engine.check_room(len(body.prompts), context.intake.least_tokens(body.prompts))
    prompts = await context.intake.prompts(body.prompts)
    requests = [
        EngineRequest(f"{envelope.id}-{index}", ids, sampling, body.timeout) for index, ids in enumerate(prompts)
    ]
    for name, engine_request in zip(prompt_names(len(requests)), requests, strict=True):
        with renaming({"prompt": name}):
            admissible(context.engine, engine_request)
    call = context.engine.take(requests)
    if body.stream:
        chunks = _chunks(context, envelope, call, body.include_usage)
        return EventStream(chunks, partial(context.engine.release, call))
    return JSONResponse(await _whole(context, envelope, call))


async def _whole(context: ServeContext, envelope: Envelope, call: Call) -> dict[str, Any]:
    tally = Tally()
    choices = {request.request_id: ChoiceText() for request in call.requests}
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for output in outputs:
            tally.note(output)
            choices[output.request_id].add(output)
    bodies = [completion_choice(index, each.text, each.finish_reason) for index, each in enumerate(choices.values())]
    return {**envelope.wrap(bodies), "usage": tally.usage()}


async def _chunks(context: ServeContext, envelope: Envelope, call: Call, include_usage: bool) -> AsyncGenerator[bytes]:
    def payload(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
        return with_usage(envelope.wrap([completion_choice(index, text, reason)]), include_usage)

    tally = Tally()
    index_of = {request.request_id: index for index, request in enumerate(call.requests)}
    texts = [EventTemplate(partial(payload, index)) for index in range(len(call.requests))]
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for output in outputs:
            tally.note(output)
            reason, index = reason_of(output), index_of[output.request_id]
            if reason:
                yield data_event(payload(index, output.text, reason))
            elif output.text:
                yield texts[index](output.text)
    if include_usage:
        yield data_event({**envelope.wrap([]), "usage": tally.usage()})
