"""POST /v1/responses, in the shape of OpenAI's Responses and stateless: nothing is stored, nothing is looked up."""

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
from millpond.serve.errors import describe
from millpond.serve.generation import GENERATION_RESPONSES
from millpond.serve.responses_protocol import ResponsesRequest
from millpond.serve.single import outputs_of, take_chat, whole_answer
from millpond.serve.sse import EventStream, EventTemplate, named_event


def responses_router(context: ServeContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", response_model=None, responses=GENERATION_RESPONSES)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await respond(context, body, request.receive, _answer)

    return router


async def _answer(context: ServeContext, body: ResponsesRequest) -> Response:
    model, created, number = context.model_name(body.model), int(context.now()), context.new_id()
    call = await take_chat(context, f"resp_{number}", body.translation())
    shape = _Shape(body, model, created, call.requests[0], f"msg_{number}")
    if body.stream:
        stream = _Stream(context, shape, call)
        release = partial(context.engine.release, call)
        return EventStream(stream.events(), release, ending=b"", failure=stream.failure)
    text, last = await whole_answer(context, call)
    return JSONResponse(shape.ended(text, last, int(context.now())))


@dataclass(frozen=True, slots=True)
class _Shape:
    """One response and its only item, a message with one part of text."""

    body: ResponsesRequest
    model: str
    created: int
    request: EngineRequest
    item_id: str

    def response(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        sampling = self.request.sampling
        return {
            "id": self.request.request_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "metadata": self.body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": self.body.user,
            **fields,
        }

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def ended(self, text: str, last: RequestOutput, now: int) -> dict[str, Any]:
        """The response that its last output completes, or leaves incomplete."""
        status = _status(last)
        fields: dict[str, Any] = {"usage": _usage(last)}
        if status == "completed":
            fields["completed_at"] = now
        else:
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return self.response(status, [self.item(status, [_part(text)])], **fields)

    def failed(self, text: str, error: Exception) -> dict[str, Any]:
        status, body = describe(error)
        codes = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
        described = {"code": codes.get(status, "server_error"), "message": body["error"]["message"]}
        output = [self.item("incomplete", [_part(text)])] if text else []
        return self.response("failed", output, error=described)


@dataclass(slots=True)
class _Stream:
    """The events of one response, numbered from 0 to the one that ends it."""

    context: ServeContext
    shape: _Shape
    call: Call
    pieces: list[str] = field(default_factory=list)
    num_events: int = 0

    async def events(self) -> AsyncGenerator[bytes]:
        shape = self.shape
        yield self._event("response.created", response=shape.response("in_progress", []))
        yield self._event("response.in_progress", response=shape.response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=shape.item("in_progress", []))
        yield self._event("response.content_part.added", **self._place(), part=_part(""))
        text_event = EventTemplate(self._text_delta, named_event)
        async with aclosing(outputs_of(self.context, self.call)) as outputs:
            async for output in outputs:
                if output.text:
                    self.pieces.append(output.text)
                    yield self._numbered(text_event(output.text))
        text, status = self.text, _status(output)
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=_part(text))
        item = shape.item(status, [_part(text)])
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{status}", response=shape.ended(text, output, int(self.context.now())))

    def failure(self, error: Exception) -> bytes:
        return self._event("response.failed", response=self.shape.failed(self.text, error))

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.shape.item_id, "output_index": 0, "content_index": 0}

    def _text_delta(self, text: str) -> dict[str, Any]:
        return {"type": "response.output_text.delta", **self._place(), "logprobs": [], "delta": text}

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._numbered(named_event({"type": kind, **fields}))

    def _numbered(self, event: bytes) -> bytes:
        """The event with its number written behind its last field, so that a template can make all the rest."""
        number, self.num_events = self.num_events, self.num_events + 1
        return b'%b,"sequence_number":%d}\n\n' % (event.removesuffix(b"}\n\n"), number)


def _usage(last: RequestOutput) -> dict[str, Any]:
    return {
        "input_tokens": last.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": last.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": last.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": last.num_prompt_tokens + last.num_output_tokens,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(last: RequestOutput) -> str:
    return "incomplete" if last.finish_reason is FinishReason.LENGTH else "completed"
