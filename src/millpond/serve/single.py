"""One answer to one conversation, for the shapes of an API that are translations of the chat route's body."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from millpond.engine.call import Call, EngineRequest
from millpond.engine.outputs import RequestOutput
from millpond.errors import InvalidRequestError
from millpond.serve import refusals
from millpond.serve.context import ServeContext
from millpond.serve.generation import renamed
from millpond.serve.protocol import Body, ChatCompletionRequest, Conversation
from millpond.serve.responses import reason_of


@dataclass(frozen=True, slots=True)
class Translation:
    """A body as the chat route has it: fields and messages, and what the caller calls them.

    places[i] is where the text of messages[i] came from; names are those of other fields.
    """

    messages: list[dict[str, Any]]
    places: Sequence[str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def conversation(self) -> Conversation:
        return Conversation.model_validate({"messages": self.messages, **self._template()})

    def chat(self) -> ChatCompletionRequest:
        return ChatCompletionRequest.model_validate({"messages": self.messages, **self.fields})

    def _template(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if name in Conversation.model_fields}

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let an InvalidRequestError name the fields as the caller wrote them."""
        try:
            yield
        except InvalidRequestError as error:
            param = error.param and self._renamed(error.param)
            raise InvalidRequestError(self._renamed(str(error)), param) from error

    def _renamed(self, text: str) -> str:
        """A field's path, or a message."""
        text = re.sub(r"\bmessages\[(\d+)\](\.content)?", lambda match: self.places[int(match[1])], text, count=1)
        return renamed(text, self.names)


def chat_content(content: str | list[Any]) -> str | list[dict[str, str]]:
    """A text, or parts that have one each, as the chat route has it."""
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


def chats_alone() -> dict[str, tuple[Any, ...]]:
    """What the chat route knows, but for hints that change nothing. Another shape refuses by name what it lacks of
    these, for there it would change the answer."""
    hints = ("user", "safety_identifier", "prompt_cache_key")
    fields = {name: () for name in ChatCompletionRequest.model_fields if name not in hints}
    return {**fields, **refusals.CHAT}


def shared_fields(body: Body) -> dict[str, Any]:
    """The fields of a body that the chat route has by the same name, but for the messages and the model."""
    names = type(body).model_fields.keys() & ChatCompletionRequest.model_fields.keys() - {"messages", "model"}
    return {name: value for name in names if (value := getattr(body, name)) is not None}


async def take_chat(context: ServeContext, request_id: str, translation: Translation) -> Call:
    """The engine's call for one answer. All that can be refused is refused here, before the status line."""
    context.engine.limits.check_generates()
    with translation.naming():
        chat = translation.chat()
        sampling = chat.sampling()
        context.engine.check_room(1, context.intake.least_chat_tokens(chat.messages))
        prompt_token_ids = await context.chat(chat, chat.timeout)
        return context.take(request_id, [EngineRequest(request_id, prompt_token_ids, sampling, **context.terms(chat))])


async def outputs_of(context: ServeContext, call: Call) -> AsyncGenerator[RequestOutput]:
    """What each step gives; the last has a finish reason. Raises EngineError for an answer that fails."""
    async with aclosing(context.engine.outputs(call)) as outputs:
        async for output in outputs:
            reason_of(output)
            yield output


async def whole_answer(context: ServeContext, call: Call) -> tuple[str, RequestOutput]:
    """The whole text, and the last output."""
    pieces: list[str] = []
    async with aclosing(outputs_of(context, call)) as outputs:
        async for output in outputs:
            pieces.append(output.text)
    return "".join(pieces), output
