"""POST /v1/completions: n choices for each prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from millpond.core.request import FinishReason
from millpond.engine.call import Call, EngineRequest
from millpond.engine.outputs import RequestOutput
from millpond.serve.context import ServeContext, respond
from millpond.serve.generation import GENERATION_RESPONSES, choice_requests, renaming, usage_of
from millpond.serve.intake import SCORE_CHARACTERS, off_loop, prompt_names
from millpond.serve.logprobs import CompletionLogprobs, TokenNames, joined, prompt_logprobs
from millpond.serve.protocol import CompletionRequest
from millpond.serve.responses import ChoiceText, Envelope, Tally, completion_choice, reason_of
from millpond.serve.sse import EventStream, EventTemplate, data_event


def completions_router(context: ServeContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses=GENERATION_RESPONSES)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await respond(context, body, request.receive, _answer)

    return router


@dataclass(slots=True)
class _Choices:
    """The choices that one body asks for, with what is echoed of each one's prompt."""

    body: CompletionRequest
    requests: list[EngineRequest]
    echoes: list[str]
    names: TokenNames
    is_echo_alone: bool
    tally: Tally = field(init=False)
    index_of: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally(self.body.n or 1)
        self.index_of = {request.request_id: index for index, request in enumerate(self.requests)}

    def take(self, output: RequestOutput) -> tuple[int, RequestOutput]:
        """Count what came; returns its choice's index and what is to be shown of it."""
        index = self.index_of[output.request_id]
        shown = _without_token(output) if self.is_echo_alone else output
        self.tally.note(index, shown)
        return index, shown

    def logprobs(self, index: int, choice: ChoiceText) -> dict[str, Any] | None:
        """The logprobs object of a whole choice."""
        if self.body.logprobs is None:
            return None
        shown = CompletionLogprobs(self.names)
        if not self.body.echo:
            return shown.output(choice.scores)
        prompt = shown.prompt(self.requests[index].prompt_token_ids, choice.prompt_scores, self.body.logprobs)
        return joined(prompt, shown.output(choice.scores))

    def whole(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        text, logprobs = self.echoes[index] + choice.text, self.logprobs(index, choice)
        shown = completion_choice(index, text, choice.finish_reason, logprobs)
        if (num_top := self.body.prompt_logprobs) is not None:
            shown["prompt_logprobs"] = prompt_logprobs(self.names, choice.prompt_scores, num_top)
        return shown


def _without_token(output: RequestOutput) -> RequestOutput:
    """Of an answer that is to be no more than its prompt."""
    if output.finish_reason is FinishReason.ERROR:
        return output
    return output._replace(new_token_ids=(), text="", scores=(), finish_reason=FinishReason.LENGTH, num_output_tokens=0)


async def _answer(context: ServeContext, body: CompletionRequest) -> Response:
    envelope = Envelope(
        f"cmpl-{context.new_id()}", "text_completion", int(context.now()), context.model_name(body.model)
    )
    context.engine.limits.check_generates()
    sampling = body.sampling()
    least_tokens = sampling.n * context.intake.least_tokens(body.prompts)
    context.engine.check_room(sampling.n * len(body.prompts), least_tokens)
    prompts = await context.intake.prompts(body.prompts)
    requests = choice_requests(envelope.id, prompts, sampling, context.terms(body))
    for name, request in zip(prompt_names(len(prompts)), requests[:: sampling.n], strict=True):
        with renaming({"prompt": name}):
            context.engine.limits.check(request.prompt_token_ids, request.sampling)
    echoes = await context.intake.texts(prompts, sampling.skip_special_tokens) if body.echo else [""] * len(prompts)
    echoes = [echo for echo in echoes for _ in range(sampling.n)]
    names = TokenNames(context.intake.tokenizer, sampling.skip_special_tokens)
    choices = _Choices(body, requests, echoes, names, body.is_echo_alone)
    call = context.take(envelope.id, requests)
    if body.stream:
        return EventStream(_chunks(context, envelope, choices, call), partial(context.engine.release, call))
    return await _whole(context, envelope, choices, call)


async def _whole(context: ServeContext, envelope: Envelope, choices: _Choices, call: Call) -> Response:
    texts = [ChoiceText() for _ in choices.requests]
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for each in outputs:
            index, output = choices.take(each)
            texts[index].add(output)

    def response() -> Response:
        bodies = [choices.whole(index, each) for index, each in enumerate(texts)]
        return JSONResponse({**envelope.wrap(bodies), "usage": choices.tally.usage()})

    return await off_loop(response, SCORE_CHARACTERS * sum(each.num_scores for each in texts))


async def _chunks(context: ServeContext, envelope: Envelope, choices: _Choices, call: Call) -> AsyncGenerator[bytes]:
    """A chunk for each output that has a text, or scores to tell, or is the last of its choice."""
    body, tally = choices.body, choices.tally
    shown = [CompletionLogprobs(choices.names) for _ in choices.requests]
    begun: set[int] = set()

    def payload(index: int, text: str, reason: str | None = None, scores: Any = None) -> dict[str, Any]:
        return {**envelope.wrap([completion_choice(index, text, reason, scores)]), **usage_of(body, tally)}

    def logprobs(index: int, output: RequestOutput, is_first: bool) -> dict[str, Any] | None:
        if body.logprobs is None:
            return None
        if not (is_first and body.echo):
            return shown[index].output(output.scores)
        ids = choices.requests[index].prompt_token_ids
        prompt = shown[index].prompt(ids, output.prompt_scores or (), body.logprobs)
        return joined(prompt, shown[index].output(output.scores))

    is_plain = body.logprobs is None and not body.continuous_usage
    texts = [EventTemplate(partial(payload, index)) for index in range(len(shown))] if is_plain else []
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for each in outputs:
            index, output = choices.take(each)
            text, is_first = output.text, index not in begun
            if is_first:
                begun.add(index)
                text = choices.echoes[index] + text
            reason = reason_of(output)
            if reason is None and is_plain:
                if text:
                    yield texts[index](text)
            elif reason or text or output.scores:
                yield data_event(payload(index, text, reason, logprobs(index, output, is_first)))
    if body.include_usage:
        yield data_event({**envelope.wrap([]), "usage": tally.usage()})
