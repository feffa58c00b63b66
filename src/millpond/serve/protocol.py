"""The request bodies of the API. Every field is here or in refusals.py; null means the default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    field_validator,
    model_validator,
)

from millpond.core.sampling import (
    MAX_BAD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SEEDS,
    SamplingParams,
    check_texts,
)
from millpond.errors import InvalidRequestError, shown
from millpond.serve import refusals
from millpond.serve.shapes import (
    MAX_PROMPTS,
    PROMPT_SHAPE,
    AllowedTokenIds,
    BadWords,
    Biases,
    Content,
    DeadlineMs,
    Priority,
    Salt,
    StopTexts,
    StopTokenIds,
    Timeout,
    ToolCalls,
    bounds,
)
from millpond.text.messages import normalize_messages

DEFAULT_COMPLETION_MAX_TOKENS = 16
MAX_MESSAGES = 10_000
MAX_BIASES = 50_000
MAX_FIELDS = 1000

# Variables of a chat template that say what the conversation is, or that the model file sets.
TEMPLATES_OWN = frozenset(
    ("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message")
) | frozenset(("bos_token", "eos_token", "unk_token", "pad_token"))

Prompt = str | list[int]


class Body(BaseModel):
    """A JSON object that is strict about types and refuses what it knows and does not serve.

    What it does not know it keeps aside, for unknown_fields to tell.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    prefix: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise InvalidRequestError(f"an object may have at most {MAX_FIELDS} fields, got {len(body)}")
        return refusals.keep_supported(body, cls.model_fields.keys(), cls.refused, cls.prefix)

    def unknown_fields(self) -> list[str]:
        """The paths of fields that nobody knows, here and in the objects below."""
        found = list(self.model_extra or ())
        for name in type(self).model_fields:
            value = getattr(self, name)
            for place, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(each, Body) and (below := each.unknown_fields()):
                    prefix = name if place is None else f"{name}[{place}]"
                    found += [f"{prefix}.{other}" for other in below]
        return found


class StreamOptions(Body):
    refused = refusals.STREAM_OPTIONS
    prefix = "stream_options."

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="The usage so far on every chunk.")

    @model_validator(mode="after")
    def _usage_comes_first(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            name = "stream_options.continuous_usage_stats"
            raise InvalidRequestError(f"{name} needs stream_options.include_usage", name)
        return self


class GenerationRequest(Body):
    """What completions and chat share."""

    model: str | None = Field(None, description="A served name; the only model where left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(
        None, description="So many choices; choice i is drawn with seed + i.", json_schema_extra=bounds(1, MAX_CHOICES)
    )
    max_tokens: int | None = Field(None, json_schema_extra=bounds(1))
    temperature: float | None = Field(None, json_schema_extra=bounds(0, 100))
    top_p: float | None = Field(None, json_schema_extra=bounds(high=1, above=0))
    top_k: int | None = Field(None, description="0 and -1 keep all tokens.", json_schema_extra=bounds(-1))
    min_p: float | None = Field(None, json_schema_extra=bounds(0, 1))
    repetition_penalty: float | None = Field(None, json_schema_extra=bounds(high=100, above=0))
    presence_penalty: float | None = Field(None, json_schema_extra=bounds(-2, 2))
    frequency_penalty: float | None = Field(None, json_schema_extra=bounds(-2, 2))
    seed: int | None = Field(None, json_schema_extra=bounds(-SEEDS // 2, SEEDS - 1))
    stop: StopTexts = Field(None, description=f"Up to {MAX_STOP_STRINGS} strings that end the answer.")
    stop_token_ids: StopTokenIds = None
    min_tokens: int | None = Field(None, json_schema_extra=bounds(0))
    logit_bias: Biases = Field(None, description="From -100 to 100 for each token id.")
    allowed_token_ids: AllowedTokenIds = None
    bad_words: BadWords = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, json_schema_extra=bounds(0, MAX_LOGPROBS))
    timeout: Timeout = None
    deadline_ms: DeadlineMs = None
    priority: Priority = None
    cache_salt: Salt = Field(None, description="Only requests of the same salt share computed prefixes.")
    user: str | None = Field(
        None, description="The tenant, with --policy fair and no API key; the two below change nothing."
    )
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, stop: Any) -> Any:
        texts = [stop] if isinstance(stop, str) else stop
        if texts is not None:
            check_texts("stop", texts, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        return texts

    @field_validator("bad_words", mode="before")
    @classmethod
    def _check_bad_words(cls, words: Any) -> Any:
        if words is not None:
            check_texts("bad_words", words, MAX_BAD_WORDS, MAX_BAD_CHARACTERS)
        return words

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _read_logit_bias(cls, biases: Any) -> Any:
        return _logit_bias(biases)

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

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed; leave stream out", "prompt_logprobs")
        return self

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

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
    prompt: Annotated[SkipValidation[str | list[str] | list[int] | list[list[int]]], PROMPT_SHAPE] = Field(
        description="Text, token ids, or a list of either."
    )

    max_tokens: int | None = Field(
        None, description="16 where left out; 0 only with echo.", json_schema_extra=bounds(0)
    )
    echo: bool | None = Field(None, description="The prompt's text before its answer's; max_tokens may be 0 then.")
    logprobs: int | None = Field(
        None,
        description="Of each token, and of so many of the likeliest there.",
        json_schema_extra=bounds(0, MAX_LOGPROBS),
    )

    @property
    def is_echo_alone(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def _overrides(self) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if (count := len(self.prompts)) * (self.n or 1) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"{count} prompts with n {self.n} are more than {MAX_PROMPTS} choices, the most that one answer has",
                "n",
            )
        if self.is_echo_alone:
            if self.min_tokens:
                raise InvalidRequestError(f"min_tokens ({self.min_tokens}) is more than max_tokens (0)", "min_tokens")
            # One token is as cheap as none: the prompt's last position is computed anyway.
            changes["max_tokens"] = 1
        if self.echo and self.logprobs is not None:
            changes["prompt_logprobs"] = max(self.prompt_logprobs or 0, self.logprobs)
        return changes

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        check_prompt(prompt)
        return prompt

    @property
    def prompts(self) -> list[Prompt]:
        """One entry for each choice of the answer."""
        return listed_prompts(self.prompt)


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(
        description="Text, or a list of text parts, which are joined with a newline; null where there are tool_calls."
    )
    name: str | None = None
    tool_calls: ToolCalls = Field(None, description="Calls of an earlier answer.")
    tool_call_id: str | None = Field(None, description="Of a tool's message: the call that it answers.")

    def as_template_sees_it(self) -> dict[str, Any]:
        return self.model_dump(include=set(type(self).model_fields), exclude_none=True)


class Conversation(Body):
    """Messages, and how the model's chat template is to make a prompt of them."""

    messages: list[ChatMessage] = Field(json_schema_extra={"minItems": 1, "maxItems": MAX_MESSAGES})
    add_generation_prompt: bool | None = Field(None, description="False leaves the assistant's turn unopened.")
    continue_final_message: bool | None = Field(None, description="The answer goes on with the final message's words.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")

    @field_validator("messages", mode="before")
    @classmethod
    def _plain_messages(cls, messages: Any) -> Any:
        _check_length("messages", messages, MAX_MESSAGES)
        if isinstance(messages, list):
            _check_parts(messages)
            messages = [_supported_part(message, f"messages[{index}].") for index, message in enumerate(messages)]
        return normalize_messages(messages)

    @field_validator("chat_template_kwargs", mode="after")
    @classmethod
    def _leave_the_templates_own(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        if len(variables or ()) > MAX_FIELDS:
            message = f"chat_template_kwargs may hold at most {MAX_FIELDS} items, got {len(variables or ())}"
            raise InvalidRequestError(message, "chat_template_kwargs")
        for name in variables or ():
            if name in TEMPLATES_OWN or name.startswith("_"):
                path = f"chat_template_kwargs.{name[:100]}"
                raise InvalidRequestError(f"{path} is not the caller's to set", path)
        return variables

    @model_validator(mode="after")
    def _go_on_or_begin(self) -> Conversation:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )
        return self


class ChatCompletionRequest(GenerationRequest, Conversation):
    refused = refusals.CHAT

    max_completion_tokens: int | None = Field(None, json_schema_extra=bounds(1))
    logprobs: bool | None = Field(None, description="The log probability of each token of the answer.")
    top_logprobs: int | None = Field(
        None, description="And of so many of the likeliest there.", json_schema_extra=bounds(0, MAX_LOGPROBS)
    )

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs may only be set when logprobs is true", "top_logprobs")
        return self

    def engine_field_names(self) -> dict[str, str]:
        """How the caller spelled what the engine calls prompt, logprobs and max_tokens."""
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    def _overrides(self) -> dict[str, Any]:
        changes: dict[str, Any] = {"logprobs": self.top_logprobs or 0 if self.logprobs else None}
        wanted, older = self.max_completion_tokens, self.max_tokens
        if wanted is None:
            return changes
        if older is not None and older != wanted:
            raise InvalidRequestError(
                f"max_completion_tokens ({wanted}) and max_tokens ({older}) are two names of one limit and differ",
                "max_completion_tokens",
            )
        return {**changes, "max_tokens": wanted}


def _logit_bias(biases: Any) -> Any:
    """The keys of a JSON object are texts; here they are written token ids."""
    if biases is None:
        return None
    if not isinstance(biases, dict):
        raise InvalidRequestError("logit_bias must be an object of token ids and numbers", "logit_bias")
    if len(biases) > MAX_BIASES:
        raise InvalidRequestError(f"logit_bias may hold at most {MAX_BIASES} items, got {len(biases)}", "logit_bias")
    for key in biases:
        if not re.fullmatch(r"-?[0-9]{1,10}", str(key), re.ASCII):
            raise InvalidRequestError(f"logit_bias: {shown(key)} is not a token id", "logit_bias")
    by_id = {int(key): bias for key, bias in biases.items()}
    if len(by_id) < len(biases):
        raise InvalidRequestError(
            f"logit_bias has {len(biases)} keys for {len(by_id)} token ids: one is written in two ways", "logit_bias"
        )
    return by_id


def listed_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """The prompts of a field that check_prompt has let pass."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def check_prompt(prompt: Any) -> None:
    """Raise InvalidRequestError unless it is text, token ids, or a list of either."""
    if isinstance(prompt, str) or _are_token_ids(prompt):
        return
    if not isinstance(prompt, list):
        raise InvalidRequestError("prompt must be text, token ids, or a list of texts or of token-id lists", "prompt")
    if not prompt:
        raise InvalidRequestError("prompt must not be an empty list", "prompt")
    _check_length("prompt", prompt, MAX_PROMPTS)
    for index, each in enumerate(prompt):
        if each == []:
            raise InvalidRequestError(f"prompt[{index}] is empty: it holds no token", f"prompt[{index}]")
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
    message = {**message, **_unknown_in_parts(message.get("content"))}
    if message.get("tool_calls") == []:  # as clients keep an answer without any
        message = {name: value for name, value in message.items() if name != "tool_calls"}
    return refusals.keep_supported(message, ChatMessage.model_fields.keys(), refusals.MESSAGE, prefix)


def _check_parts(messages: list[Any]) -> None:
    """Bound the parts of all messages together, and the calls of tools, before each is looked at."""
    for name in ("content", "tool_calls"):
        lists = (message.get(name) for message in messages if isinstance(message, dict))
        count = sum(len(each) for each in lists if isinstance(each, list))
        if count > MAX_MESSAGES:
            raise InvalidRequestError(
                f"the {name} of all messages may hold at most {MAX_MESSAGES} items together, got {count}", "messages"
            )


def _unknown_in_parts(content: Any) -> dict[str, Any]:
    """What text parts have beside their text, by its path, as further fields of their message: nobody knows it."""
    if not isinstance(content, list):
        return {}
    return {
        f"content[{index}].{name}": value
        for index, part in enumerate(content)
        if isinstance(part, dict) and part.keys() > {"type", "text"}
        for name, value in part.items()
        if name not in ("type", "text") and value is not None
    }
