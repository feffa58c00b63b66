"""What the description of the API says of fields beyond their types. Whoever takes a value checks it; this tells."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from millpond.core.policies import MOST_PRIORITY
from millpond.core.sampling import (
    MAX_BAD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from millpond.engine.call import MOST_DEADLINE_MS

MAX_PROMPTS = 1024

Schema = dict[str, Any]


def bounds(low: float | None = None, high: float | None = None, *, above: float | None = None) -> Schema:
    """Those of a number, for json_schema_extra."""
    return _given(minimum=low, maximum=high, exclusiveMinimum=above)


def _given(**words: Any) -> Schema:
    return {word: value for word, value in words.items() if value is not None}


def _text(most: int | None = None) -> Schema:
    return {"type": "string", "minLength": 1, **_given(maxLength=most)}


def _list_of(item: Schema, most: int | None = None, least: int | None = None) -> Schema:
    return {"type": "array", "items": item, **_given(minItems=least, maxItems=most)}


def _one_of(*shapes: Schema) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(shapes)})


_NULL = {"type": "null"}
_TOKEN_ID = {"type": "integer", "minimum": 0}
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_BIASES = {"type": "object", "patternProperties": {"^[0-9]{1,10}$": _BIAS}, "additionalProperties": False}
_TOOL_CALL = {"type": "object", "properties": {"function": {"type": "object"}}, "required": ["function"]}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

PROMPT_SHAPE = _one_of(
    _text(),
    _list_of(_text(), MAX_PROMPTS, 1),
    _list_of(_TOKEN_ID, least=1),
    _list_of(_list_of(_TOKEN_ID, least=1), MAX_PROMPTS, 1),
)
Content = Annotated[str, _one_of({"type": "string"}, _list_of(_TEXT_PART, least=1), _NULL)]
ToolCalls = Annotated[list[dict[str, Any]] | None, _one_of(_list_of(_TOOL_CALL), _NULL)]
StopTexts = Annotated[
    str | list[str] | None,
    _one_of(_text(MAX_STOP_CHARACTERS), _list_of(_text(MAX_STOP_CHARACTERS), MAX_STOP_STRINGS), _NULL),
]
BadWords = Annotated[list[str] | None, _one_of(_list_of(_text(MAX_BAD_CHARACTERS), MAX_BAD_WORDS), _NULL)]
Biases = Annotated[dict[int, float] | None, _one_of(_BIASES, _NULL)]
TokenIds = Annotated[list[int], WithJsonSchema(_list_of(_TOKEN_ID))]
StopTokenIds = Annotated[list[int] | None, _one_of(_list_of(_TOKEN_ID, MAX_STOP_TOKEN_IDS), _NULL)]
AllowedTokenIds = Annotated[list[int] | None, _one_of(_list_of(_TOKEN_ID, least=1), _NULL)]
Salt = Annotated[str | None, _one_of(_text(MAX_SALT_CHARACTERS), _NULL)]

# What every request may ask of its turn.
Timeout = Annotated[
    float | None,
    Field(description="Seconds that the whole answer may take, waiting included.", json_schema_extra=bounds(above=0)),
]
DeadlineMs = Annotated[
    int | None,
    Field(
        description="Milliseconds in which the whole answer is of use; a 503 at once where that cannot be.",
        json_schema_extra=bounds(1, MOST_DEADLINE_MS),
    ),
]
Priority = Annotated[
    int | None,
    Field(
        description="A smaller one goes first; only with --policy priority.",
        json_schema_extra=bounds(-MOST_PRIORITY, MOST_PRIORITY),
    ),
]
