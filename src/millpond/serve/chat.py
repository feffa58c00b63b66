"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from millpond.engine.call import Call
from millpond.serve.context import ServeContext, respond
from millpond.serve.generation import GENERATION_RESPONSES, choice_requests, renaming, usage_of
from millpond.serve.intake import SCORE_CHARACTERS, off_loop
from millpond.serve.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from millpond.serve.protocol import ChatCompletionRequest
from millpond.serve.responses import ChoiceText, Envelope, Tally, chat_choice, chat_delta, reason_of
from millpond.serve.sse import EventStream, EventTemplate, data_event


def chat_router(context: ServeContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None, responses=GENERATION_RESPONSES)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        return await respond(context, body, request.receive, _answer)

    return router


async def _answer(context: ServeContext, body: ChatCompletionRequest) -> Response:
    envelope = Envelope(
        f"chatcmpl-{context.new_id()}", "chat.completion", int(context.now()), context.model_name(body.model)
    )
    context.engine.limits.check_generates()
    with renaming(body.engine_field_names()):
        sampling = body.sampling()
        context.engine.check_room(sampling.n, sampling.n * context.intake.least_chat_tokens(body.messages))
        prompt_token_ids = await context.chat(body, body.timeout)
        requests = choice_requests(envelope.id, [prompt_token_ids], sampling, context.terms(body))
        if sampling.n == 1:
            requests = [replace(requests[0], request_id=envelope.id)]
        call = context.take(envelope.id, requests)
    names = TokenNames(context.intake.tokenizer, sampling.skip_special_tokens)
    if body.stream:
        chunk = replace(envelope, kind="chat.completion.chunk")
        return EventStream(_chunks(context, chunk, body, call, names), partial(context.engine.release, call))
    return await _whole(context, envelope, body, call, names)


async def _whole(
    context: ServeContext, envelope: Envelope, body: ChatCompletionRequest, call: Call, names: TokenNames
) -> Response:
    requests = call.requests
    tally, answers = Tally(len(requests)), {request.request_id: ChoiceText() for request in requests}
    index_of = {request_id: index for index, request_id in enumerate(answers)}
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for output in outputs:
            tally.note(index_of[output.request_id], output)
            answers[output.request_id].add(output)

    def choice(index: int, each: ChoiceText) -> dict[str, Any]:
        scores = chat_logprobs(names, each.scores) if body.logprobs else None
        return chat_choice(index, each.text, each.finish_reason, scores)

    def response() -> Response:
        choices = [choice(index, each) for index, each in enumerate(answers.values())]
        whole = {**envelope.wrap(choices), "usage": tally.usage()}
        if body.prompt_logprobs is not None:
            scores = answers[requests[0].request_id].prompt_scores
            whole["prompt_logprobs"] = prompt_logprobs(names, scores, body.prompt_logprobs)
        return JSONResponse(whole)

    return await off_loop(response, SCORE_CHARACTERS * sum(each.num_scores for each in answers.values()))


async def _chunks(
    context: ServeContext, envelope: Envelope, body: ChatCompletionRequest, call: Call, names: TokenNames
) -> AsyncGenerator[bytes]:
    """Of each choice the role once, before everything; the finish reason once, after everything and alone."""
    requests = call.requests
    tally, index_of = Tally(len(requests)), {request.request_id: index for index, request in enumerate(requests)}

    def payload(index: int, delta: dict[str, Any], reason: str | None = None, scores: Any = None) -> dict[str, Any]:
        return {**envelope.wrap([chat_delta(index, delta, reason, scores)]), **usage_of(body, tally)}

    def content(index: int, text: str) -> dict[str, Any]:
        return payload(index, {"content": text})

    is_plain = not body.logprobs and not body.continuous_usage
    texts = [EventTemplate(partial(content, index)) for index in range(len(requests))] if is_plain else []
    begun: set[int] = set()
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for output in outputs:
            index = index_of[output.request_id]
            tally.note(index, output)
            reason = reason_of(output)
            if index not in begun:
                begun.add(index)
                yield data_event(payload(index, {"role": "assistant", "content": ""}))
            if is_plain:
                if output.text:
                    yield texts[index](output.text)
            elif output.text or output.scores:
                scores = chat_logprobs(names, output.scores) if body.logprobs else None
                yield data_event(payload(index, {"content": output.text}, None, scores))
            if reason:
                yield data_event(payload(index, {}, reason))
    if body.include_usage:
        yield data_event({**envelope.wrap([]), "usage": tally.usage()})
