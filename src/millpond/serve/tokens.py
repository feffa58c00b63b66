"""POST /tokenize and /detokenize, in the shapes of vLLM's server."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from millpond.errors import InvalidRequestError
from millpond.serve.context import ServeContext, with_headers
from millpond.serve.errors import described
from millpond.serve.logprobs import TokenNames
from millpond.serve.protocol import Body, ChatMessage, Conversation
from millpond.serve.shapes import TokenIds


class Tokenize(Conversation):
    """A prompt, or messages, which the chat template makes one of."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    add_special_tokens: bool | None = Field(None, description="What the model begins and ends a prompt with; true.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Tokenize:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequestError("send either prompt or messages", "prompt")
        if self.messages and self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens is for prompts; a chat template writes the special tokens itself",
                "add_special_tokens",
            )
        return self


class Detokenize(Body):
    model: str | None = None
    tokens: TokenIds


def tokens_router(context: ServeContext) -> APIRouter:
    router, intake = APIRouter(), context.intake

    @router.post("/tokenize", response_model=None, responses=described(400, 401, 404, 413, 503, 504))
    async def tokenize(body: Tokenize) -> Response:
        warnings = context.warnings(body)
        context.model_name(body.model)
        if body.prompt is None:
            token_ids = await context.chat(body)
        else:
            token_ids = await intake.tokens_of(body.prompt, body.add_special_tokens is not False)
        names = TokenNames(intake.tokenizer, skip_special_tokens=False)
        answer = {
            "count": len(token_ids),
            "max_model_len": context.engine.limits.max_total_tokens,
            "tokens": token_ids,
            "token_strs": [names.text(token_id) for token_id in token_ids] if body.return_token_strs else None,
        }
        return with_headers(JSONResponse(answer), warnings)

    @router.post("/detokenize", response_model=None, responses=described(400, 401, 404, 413, 503))
    async def detokenize(body: Detokenize) -> Response:
        warnings = context.warnings(body)
        context.model_name(body.model)
        context.engine.limits.check_ids(body.tokens, "tokens")
        (text,) = await intake.texts([body.tokens], skip_special_tokens=False)
        return with_headers(JSONResponse({"prompt": text}), warnings)

    return router
