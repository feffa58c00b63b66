"""The body of /v1/responses, in the shape of OpenAI's Responses, and what the chat route makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from millpond.errors import InvalidRequestError, shown
from millpond.serve import refusals
from millpond.serve.protocol import Body
from millpond.serve.reading import check_count, read_content, read_object
from millpond.serve.single import Translation, chat_content, chats_alone, shared_fields
from millpond.text.checks import check_unicode

MAX_METADATA = 16
MAX_METADATA_CHARACTERS = 512


class TextPart(Body):
    refused = refusals.RESPONSES_PART

    type: Literal["input_text", "output_text"]
    text: str


GIVEN = {"input_text": TextPart}
PARTS: Mapping[str, Mapping[str, type[TextPart]]] = {
    "user": GIVEN,
    "system": GIVEN,
    "developer": GIVEN,
    "assistant": {"output_text": TextPart},
}


class MessageItem(Body):
    """One message; an answer's can be sent back as it came, with its id and status, which change nothing."""

    refused = refusals.RESPONSES_MESSAGE

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]
    id: str | None = None
    status: str | None = None


class TextConfig(Body):
    refused = refusals.RESPONSES_TEXT
    prefix = "text."


class ResponsesRequest(Body):
    """Nothing is kept between two requests, so store is false here and null means that, too."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**chats_alone(), **refusals.RESPONSES}

    model: str | None = Field(None, description="A served name; the only model where left out.")
    input: str | list[MessageItem]
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = Field(None, description="Comes back with the answer and changes nothing.")
    user: str | None = Field(None, description="As the chat route has it; the two below change nothing.")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    timeout: float | None = Field(None, description="As the chat route has it, like the three below.")
    deadline_ms: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _read_input(cls, items: Any) -> Any:
        if isinstance(items, str):
            return items
        if not isinstance(items, list) or not items:
            raise InvalidRequestError(f"input must be a string or a list of messages, got {shown(items)}", "input")
        check_count(items, "input")
        return [_read_item(item, f"input[{index}]") for index, item in enumerate(items)]

    @field_validator("metadata", mode="after")
    @classmethod
    def _bound_metadata(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        if metadata is not None and len(metadata) > MAX_METADATA:
            raise InvalidRequestError(
                f"metadata may hold at most {MAX_METADATA} pairs, got {len(metadata)}", "metadata"
            )
        for key, text in (metadata or {}).items():
            check_unicode(key + text, "metadata")
        longest = max((len(text) for pair in (metadata or {}).items() for text in pair), default=0)
        if longest > MAX_METADATA_CHARACTERS:
            raise InvalidRequestError(
                f"metadata may hold texts of at most {MAX_METADATA_CHARACTERS} characters, got {longest}", "metadata"
            )
        return metadata

    def translation(self) -> Translation:
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        places = (
            ["input"] if isinstance(self.input, str) else [f"input[{index}].content" for index in range(len(items))]
        )
        messages = [{"role": item.role, "content": chat_content(item.content)} for item in items]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
            places.insert(0, "instructions")
        fields = {**shared_fields(self), "max_tokens": self.max_output_tokens}
        names = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
        return Translation(messages, places, fields, names)


def _read_item(value: Any, path: str) -> MessageItem:
    if isinstance(value, dict):
        kind = value.get("type")
        if kind not in (None, "message"):
            raise InvalidRequestError(f"{path}.type is {shown(kind)}; only 'message' is supported", f"{path}.type")
        if isinstance(role := value.get("role"), str) and role in PARTS:
            value = {**value, "content": read_content(PARTS[role], value.get("content"), f"{path}.content")}
    return read_object(MessageItem, value, path)
