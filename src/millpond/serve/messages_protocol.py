"""The bodies of /v1/messages, in Anthropic's shape, and what the chat route makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from millpond.core.sampling import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, check_texts
from millpond.errors import InvalidRequestError
from millpond.serve import refusals
from millpond.serve.protocol import Body
from millpond.serve.reading import check_count, read_content, read_object
from millpond.serve.single import Translation, chat_content, chats_alone, shared_fields


class Block(Body):
    """One part of a message. cache_control changes nothing."""

    type: str
    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    refused = refusals.TEXT_BLOCK

    text: str


class ToolUseBlock(Block):
    refused = refusals.TOOL_USE_BLOCK

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block):
    refused = refusals.TOOL_RESULT_BLOCK

    tool_use_id: str
    content: str | list[TextBlock] | None = None


TEXT: Mapping[str, type[Block]] = {"text": TextBlock}
BLOCKS: Mapping[str, Mapping[str, type[Block]]] = {
    "user": {**TEXT, "tool_result": ToolResultBlock},
    "assistant": {**TEXT, "tool_use": ToolUseBlock},
    "system": TEXT,
}


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ToolUseBlock | ToolResultBlock]


class Metadata(Body):
    user_id: str | None = Field(None, description="Changes nothing.")


class CountTokensRequest(Body):
    """A conversation whose last message, where it is the assistant's, is one that the answer goes on with."""

    refused = refusals.ANTHROPIC

    model: str | None = Field(None, description="A served name; the only model where left out.")
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    cache_control: dict[str, Any] | None = Field(None, description="Changes nothing.")

    @field_validator("system", mode="before")
    @classmethod
    def _read_system(cls, system: Any) -> Any:
        return None if system is None else read_content(TEXT, system, "system")

    @field_validator("messages", mode="before")
    @classmethod
    def _read_messages(cls, messages: Any) -> Any:
        if not isinstance(messages, list):
            return messages
        check_count(messages, "messages")
        return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def translation(self) -> Translation:
        """Raises InvalidRequestError for a conversation that makes no sense."""
        if not self.messages:
            raise InvalidRequestError("messages must hold at least one message", "messages")
        messages: list[dict[str, Any]] = []
        places: list[str] = []
        if self.system is not None:
            messages.append({"role": "system", "content": chat_content(self.system)})
            places.append("system")
        for index, message in enumerate(self.messages):
            path = f"messages[{index}].content"
            for each in _chat_messages(message, path):
                messages.append(each)
                places.append(path)
        fields = self._chat_fields()
        if self.messages[-1].role == "assistant":
            _check_continuable(messages[-1], places[-1])
            fields["continue_final_message"] = True
        return Translation(messages, places, fields, {"continue_final_message": "messages", "prompt": "messages"})

    def _chat_fields(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountTokensRequest):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **chats_alone(),
        **refusals.ANTHROPIC,
        **refusals.ANTHROPIC_MESSAGES,
    }

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = Field(None, description=f"Up to {MAX_STOP_STRINGS}.")
    stream: bool | None = None
    metadata: Metadata | None = None
    timeout: float | None = Field(None, description="As the chat route has it, like the three below.")
    deadline_ms: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @field_validator("stop_sequences", mode="before")
    @classmethod
    def _check_stop_sequences(cls, texts: Any) -> Any:
        if texts is not None:
            check_texts("stop_sequences", texts, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        return texts

    def _chat_fields(self) -> dict[str, Any]:
        return {**shared_fields(self), "stop": self.stop_sequences}


def _read_message(value: Any, path: str) -> Message:
    if isinstance(value, dict) and isinstance(role := value.get("role"), str) and role in BLOCKS:
        content = _read_results(value.get("content"), f"{path}.content")
        value = {**value, "content": read_content(BLOCKS[role], content, f"{path}.content")}
    return read_object(Message, value, path)


def _read_results(content: Any, path: str) -> Any:
    """The blocks, with the contents of tools' results read."""
    if not isinstance(content, list):
        return content
    check_count(content, path)
    return [
        {**block, "content": read_content(TEXT, block["content"], f"{path}[{index}].content")}
        if isinstance(block, dict) and block.get("type") == "tool_result" and block.get("content") not in (None, [])
        else block
        for index, block in enumerate(content)
    ]


def _chat_messages(message: Message, path: str) -> Iterator[dict[str, Any]]:
    """A message without the results of tools is one of the chat route's; each of those is one of its own."""
    content = message.content
    if isinstance(content, str):
        yield {"role": message.role, "content": content}
        return
    texts: list[TextBlock] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        if isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": "user", "content": chat_content(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": chat_content(block.content or "")}
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif calls:
            where = f"{path}[{index}]"
            raise InvalidRequestError(f"{where} is text behind a tool_use block, which is not supported yet", where)
        else:
            texts.append(block)
    if calls:
        yield {"role": message.role, "content": chat_content(texts) or None, "tool_calls": calls}
    elif texts:
        yield {"role": message.role, "content": chat_content(texts)}


def _check_continuable(message: Mapping[str, Any], path: str) -> None:
    if "tool_calls" in message:
        raise InvalidRequestError(f"{path} ends with tool_use blocks, whose tool_result blocks have to follow", path)
    content = message["content"]
    if not (content if isinstance(content, str) else "".join(part["text"] for part in content)).strip():
        raise InvalidRequestError(f"{path} is empty, so the answer has nothing to go on with", path)
