"""The request bodies of the API. Every field is here or in refusals.py; null means the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, field_validator, model_validator

from millpond.core.request import SamplingParams
from millpond.errors import InvalidRequestError
from millpond.serve import refusals
from millpond.text.messages import normalize_messages

DEFAULT_COMPLETION_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_MESSAGES = 10_000
MAX_STOP_TOKEN_IDS = 1000
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000

Prompt = str | list[int]


class Body(BaseModel):
    """A JSON object that is strict about types and refuses what it does not serve."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    prefix: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return refusals.keep_supported(body, cls.model_fields.keys(), cls.refused, cls.prefix)


class StreamOptions(Body):
    refused = refusals.STREAM_OPTIONS
    prefix = "stream_options."

    include_usage: bool | None = None


class GenerationRequest(Body):
    """What completions and chat share."""

    model: str | None = Field(None, description="A served name; the only model where left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = Field(None, description=f"Up to {MAX_STOP_STRINGS} strings that end the answer.")
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, description="Only requests of the same salt share computed prefixes.")
    user: str | None = Field(None, description="Changes nothing, like the two below.")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, stop: Any) -> Any:
        return _stop_strings(stop)

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _check_stop_token_ids(cls, token_ids: Any) -> Any:
        _check_length("stop_token_ids", token_ids, MAX_STOP_TOKEN_IDS)
        return token_ids

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options may only be set when stream is true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> SamplingParams:
        """The fields that were set, over the defaults of the API. Raises InvalidRequestError naming the field."""
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(**{"max_tokens": self.default_max_tokens, **chosen, **self._overrides()})

    default_max_tokens: ClassVar[int | None] = None

    def _overrides(self) -> dict[str, Any]:
        return {}


class CompletionRequest(GenerationRequest):
    refused = refusals.COMPLETION
    default_max_tokens = DEFAULT_COMPLETION_MAX_TOKENS

    # Checked below, in one pass: trying each alternative on a long list takes the event loop ten times as long.
    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]] = Field(
        description="Text, token ids, or a list of either."
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        _check_prompt(prompt)
        return prompt

    @property
    def prompts(self) -> list[Prompt]:
        """One entry for each choice of the answer."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str = Field(description="Text, or a list of text parts, which are joined with a newline.")
    name: str | None = None


class ChatCompletionRequest(GenerationRequest):
    refused = refusals.CHAT

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _plain_messages(cls, messages: Any) -> Any:
        _check_length("messages", messages, MAX_MESSAGES)
        if isinstance(messages, list):
            messages = [_supported_part(message, f"messages[{index}].") for index, message in enumerate(messages)]
        return normalize_messages(messages)

    def engine_field_names(self) -> dict[str, str]:
        """How the caller spelled what the engine calls prompt and max_tokens."""
        names = {"prompt": "messages"}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    def _overrides(self) -> dict[str, Any]:
        wanted, older = self.max_completion_tokens, self.max_tokens
        if wanted is None:
            return {}
        if older is not None and older != wanted:
            raise InvalidRequestError(
                f"max_completion_tokens ({wanted}) and max_tokens ({older}) are two names of one limit and differ",
                "max_completion_tokens",
            )
        return {"max_tokens": wanted}


def _stop_strings(stop: Any) -> list[str] | None:
    texts = [stop] if isinstance(stop, str) else stop
    if texts is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("stop must be a string or a list of strings", "stop")
    _check_length("stop", texts, MAX_STOP_STRINGS)
    longest = max(map(len, texts), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"a stop string may have at most {MAX_STOP_CHARACTERS} characters, got {longest}", "stop"
        )
    return texts


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str) or _are_token_ids(prompt):
        return
    if not isinstance(prompt, list):
        raise InvalidRequestError("prompt must be text, token ids, or a list of texts or of token-id lists", "prompt")
    if not prompt:
        raise InvalidRequestError("prompt must not be an empty list", "prompt")
    _check_length("prompt", prompt, MAX_PROMPTS)
    for index, each in enumerate(prompt):
        if each == []:
            raise InvalidRequestError(f"prompt {index} is empty: it holds no token", f"prompt[{index}]")
    if not (all(isinstance(each, str) for each in prompt) or all(map(_are_token_ids, prompt))):
        raise InvalidRequestError(
            "a list of prompts must hold only texts, only token ids or only token-id lists", "prompt"
        )


def _check_length(name: str, items: Any, most: int) -> None:
    """Before anything is done to each item."""
    if isinstance(items, list) and len(items) > most:
        raise InvalidRequestError(f"{name} may hold at most {most} items, got {len(items)}", name)


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _supported_part(message: Any, prefix: str) -> Any:
    if not isinstance(message, dict):
        return message
    return refusals.keep_supported(message, ChatMessage.model_fields.keys(), refusals.MESSAGE, prefix)
