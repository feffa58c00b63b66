"""Marks around special tokens that somebody spells in a message, so that they stay text in the prompt.

The template gets the strings with two characters around each such spelling, that stand for nothing in Unicode and are
not in what it was given; they are taken out of what it gives, and the places are remembered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from millpond.errors import InvalidRequestError

Spans = tuple[tuple[int, int], ...]
_NONCHARACTERS = [chr(point) for point in range(0xFDD0, 0xFDF0)]
ESCAPED = re.compile(r"\\u(fd[de][0-9a-f])")  # how JSON in ASCII writes them


class RenderedChat(str):
    """A prompt's text. spoken are the places in it, begin and end, where a message spells a special token."""

    spoken: Spans = ()

    @classmethod
    def of(cls, text: str, spoken: Spans) -> RenderedChat:
        made = cls(text)
        made.spoken = spoken
        return made


class Marks:
    """The two characters for one rendering, which `given` does not hold. tokens matches every special token."""

    __slots__ = ("_begin", "_end", "_pairs", "_tokens")

    def __init__(self, tokens: re.Pattern[str], given: str) -> None:
        free = [each for each in _NONCHARACTERS if each not in given]
        if len(free) < 2:
            raise InvalidRequestError("the messages hold all of Unicode's noncharacters; leave them out", "messages")
        self._tokens = tokens
        self._begin, self._end = free[:2]
        self._pairs = re.compile(f"{self._begin}([^{self._begin}{self._end}]*){self._end}|[{self._begin}{self._end}]")

    def around(self, value: Any) -> Any:
        """A value of JSON with marks around every special token in its strings, names of fields among them."""
        if isinstance(value, str):
            return self._tokens.sub(rf"{self._begin}\g<0>{self._end}", value)
        if isinstance(value, Mapping):
            return {self.around(key): self.around(item) for key, item in value.items()}
        return [self.around(item) for item in value] if isinstance(value, list | tuple) else value

    def taken_out(self, text: str) -> RenderedChat:
        """The text without marks. One that lost its other half, by a template that splits strings, is only left out."""
        parts: list[str] = []
        spoken: list[tuple[int, int]] = []
        place = length = 0
        for match in self._pairs.finditer(text):
            parts.append(text[place : match.start()])
            length += len(parts[-1])
            if match[1]:
                parts.append(match[1])
                spoken.append((length, length + len(match[1])))
                length += len(match[1])
            place = match.end()
        return RenderedChat.of("".join([*parts, text[place:]]), tuple(spoken))


def marks_for(tokens: re.Pattern[str] | None, values: Any) -> Marks | None:
    """Marks, where a special token is spelled at all in what a template is to be given."""
    if tokens is None:
        return None
    given = json.dumps(values, ensure_ascii=False, default=str)
    return Marks(tokens, given) if tokens.search(given) else None
