"""POST /v1/embeddings: a vector for each text, of a model that is made for that."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, SkipValidation, field_validator

from millpond.engine.embeddings import embedding_params, numbers_of, shortened
from millpond.errors import EngineError, InvalidRequestError
from millpond.serve import refusals
from millpond.serve.context import ServeContext, respond
from millpond.serve.errors import described, error_body
from millpond.serve.generation import choice_requests
from millpond.serve.intake import off_loop, prompt_names
from millpond.serve.protocol import Body, Prompt, check_prompt, listed_prompts
from millpond.serve.responses import reason_of
from millpond.serve.shapes import PROMPT_SHAPE, DeadlineMs, Priority, Salt, Timeout, bounds


class EmbeddingRequest(Body):
    refused = refusals.EMBEDDING

    model: str | None = Field(None, description="A served name; the only model where left out.")
    input: Annotated[SkipValidation[str | list[str] | list[int] | list[list[int]]], PROMPT_SHAPE] = Field(
        description="Text, token ids, or a list of either."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or base64 of little-endian float32; float."
    )
    dimensions: int | None = Field(
        None, description="So many of the first numbers, again of length 1; all.", json_schema_extra=bounds(1)
    )
    timeout: Timeout = None
    deadline_ms: DeadlineMs = None
    priority: Priority = None
    cache_salt: Salt = Field(None, description="Only requests of the same salt share computed prefixes.")
    user: str | None = Field(None, description="The tenant, with --policy fair and no API key.")

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, given: Any) -> Any:
        with calling_it_input():
            check_prompt(given)
        return given

    @property
    def inputs(self) -> list[Prompt]:
        return listed_prompts(self.input)


def embeddings_router(context: ServeContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", response_model=None, responses=described(400, 401, 404, 413, 429, 503, 504))
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await respond(context, body, request.receive, _answer)

    return router


@contextmanager
def calling_it_input() -> Iterator[None]:
    """Let an InvalidRequestError speak of the field as it is called here: what elsewhere is a prompt is an input."""
    try:
        yield
    except InvalidRequestError as error:
        param = error.param and re.sub("^prompt", "input", error.param)
        raise InvalidRequestError(re.sub(r"\bprompt(s?)\b", r"input\1", str(error), count=1), param) from error


async def _answer(context: ServeContext, body: EmbeddingRequest) -> Response:
    name, size = context.model_name(body.model), context.engine.limits.embedding_size
    if not size:
        message = f"{context.model_names[0]} makes no embeddings: it is a language model, or pools in a way of its own"
        return JSONResponse(error_body(message, "invalid_request_error", "model", "not_supported"), 400)
    context.engine.limits.check_dimensions(body.dimensions)
    with calling_it_input():
        least_tokens = context.intake.least_tokens(body.inputs)
        context.engine.check_room(len(body.inputs), least_tokens)
        inputs = await context.intake.prompts(body.inputs)
        _check_lengths(context, inputs)
        found = await _embeddings(context, body, inputs)

    def response() -> Response:
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(each, body.dimensions, body.encoding_format)}
            for index, each in enumerate(found)
        ]
        count = sum(map(len, inputs))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    return await off_loop(response, len(found) * size)


def _check_lengths(context: ServeContext, inputs: list[list[int]]) -> None:
    """Each by itself, so that an error names it."""
    limits, most = context.engine.limits, context.engine.limits.max_prompt_tokens
    for name, each in zip(prompt_names(len(inputs)), inputs, strict=True):
        if not each:
            raise InvalidRequestError(f"{name} is empty: it must have at least 1 token", name)
        if len(each) > most:
            raise InvalidRequestError(f"{name} has {len(each)} tokens, and at most {most} fit; shorten it", name)
        limits.check_ids(each, name)


async def _embeddings(context: ServeContext, body: EmbeddingRequest, inputs: list[list[int]]) -> list[bytes]:
    """Of each input, as little-endian float32. Raises EngineError where one fails."""
    answer_id = f"embd-{context.new_id()}"
    requests = choice_requests(answer_id, inputs, embedding_params(body.cache_salt), context.terms(body))
    found: dict[str, bytes] = {}
    async with aclosing(context.engine.outputs(context.take(answer_id, requests))) as outputs:
        async for output in outputs:
            if reason_of(output) is None or output.embedding is None:
                raise EngineError("no embedding came of the forward pass")
            found[output.request_id] = output.embedding
    return [found[request.request_id] for request in requests]


def encoded(embedding: bytes, dimensions: int | None, encoding_format: str | None) -> list[float] | str:
    """An embedding as it is sent."""
    embedding = shortened(embedding, dimensions)
    if encoding_format == "base64":
        return base64.b64encode(embedding).decode()
    return numbers_of(embedding)
