"""What one rendering of a chat template may take: every loop, call, filter and operator is charged before it works."""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence, Set, ValuesView
from itertools import chain
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

# Copying this many characters takes about as long as a turn of a loop; some filters are slower.
COPIED = 256
WORKED = 32
ITEM = 8  # the characters that an item of a sequence counts for where it is only copied
NODE = COPIED  # and where it is looked into
MAX_BITS = 2**14  # of a whole number that is calculated with; Python writes none with more than 4,300 digits
MAX_WIDTH = 10_000

_WIDTH = re.compile(r"\d{5,}")
_WIDTH_ELSEWHERE = re.compile(r"%[^a-zA-Z%]*\*")
_NUMBERS = (int, float)
_SEQUENCES = (str, bytes, list, tuple)
_HOLDERS = (Sequence, Set, ValuesView)  # not a loop, which has a length but is spent by looking at it


class Refusal(TemplateError):
    """The template, or a bound on it, refuses the messages."""


class Budget:
    """What is left of one rendering's steps. Sizes are in characters; an item of a sequence counts for eight.

    is_unwanted is asked at every step whether anybody still waits.
    """

    __slots__ = ("_is_unwanted", "_left", "_limit", "_max_characters")

    def __init__(self, limit: int, max_characters: int, is_unwanted: Callable[[], bool] = lambda: False) -> None:
        self._left = self._limit = limit
        self._max_characters = max_characters
        self._is_unwanted = is_unwanted

    def take(self, steps: int = 1) -> None:
        if self._is_unwanted():
            raise Refusal("nobody waits for what the chat template gives")
        self._left -= steps
        if self._left < 0:
            raise Refusal(f"the chat template took more than {self._limit} steps")

    def check(self, size: int) -> None:
        """Refusal where one value may not be that large."""
        if size > self._max_characters:
            raise Refusal(f"the chat template makes a value of {size} characters, more than {self._max_characters}")

    def charge(self, size: int) -> None:
        """Take the steps of making a value of that size, which is checked."""
        self.check(size)
        self.take(size // COPIED)

    def measured(self, value: Any, rate: int = COPIED) -> int:
        """The size of a value with all that it holds, as often as it holds it, and take the steps of going through it.

        Refusal once they do not suffice.
        """
        if isinstance(value, str):
            self.take(len(value) // rate)
            return len(value)
        try:
            size = self._deep_size(value, (self._left + 1) * rate, {})
        except RecursionError:
            raise Refusal("the chat template nests a value too deeply") from None
        self.take(size // rate)
        return size

    def _deep_size(self, value: Any, most: int, sizes: dict[int, int]) -> int:
        """The size of a value with all that it holds. sizes has what holders hold, by id, for what is held twice is
        looked into once: a list of two of the one before, and so on, has more parts than can be counted."""
        size = flat_size(value)
        parts = _parts_of(value)
        if parts is not None:
            if id(value) not in sizes:
                held, sizes[id(value)] = 0, most  # too much, should it hold itself
                for part in parts:
                    held += NODE + self._deep_size(part, most - size - held - NODE, sizes)
                sizes[id(value)] = held
            size += sizes[id(value)]
        if size > most:
            raise Refusal(f"the chat template took more than {self._limit} steps, by a value that is too large")
        return size


def _parts_of(value: Any) -> Iterable[Any] | None:
    """What a value holds, none of it made for the asking."""
    if isinstance(value, str | bytes | int | range):
        return None
    if isinstance(value, ItemsView):
        return chain.from_iterable(value)
    if isinstance(value, Mapping):
        return chain(value.keys(), value.values())
    if isinstance(value, Namespace):
        return (value._Namespace__attrs,)
    return value if isinstance(value, _HOLDERS) else None


def flat_size(value: Any) -> int:
    """The size of a value without what its items hold."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    return ITEM * len(value) if isinstance(value, (*_HOLDERS, Mapping)) else 0


def binop_size(operator: str, left: Any, right: Any, budget: Budget) -> int:
    """The size of what an operator makes. Refusal for numbers and widths out of bounds."""
    if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
        _check_numbers(operator, left, right)
        return 0
    if operator == "*" and isinstance(left, int) and isinstance(right, _SEQUENCES):
        left, right = right, left
    if operator == "*" and isinstance(left, _SEQUENCES) and isinstance(right, int):
        return flat_size(left) * max(right, 0)
    if operator == "%" and isinstance(left, str | bytes):
        return formatted_size(left, right, budget)
    return flat_size(left) + flat_size(right)


def formatted_size(pattern: str | bytes, values: Any, budget: Budget) -> int:
    """At most what `pattern % values` has. Refusal for a width that is too large, or not in the pattern."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    check_width(text)
    if _WIDTH_ELSEWHERE.search(text):
        raise Refusal("the chat template formats with a width of *, which is not supported")
    return len(text) + text.count("%") * (budget.measured(values) + longest_width(text))


def check_width(pattern: str) -> None:
    for match in _WIDTH.finditer(pattern):
        if len(match[0]) > 9 or int(match[0]) > MAX_WIDTH:
            raise Refusal(f"the chat template formats to a width of {match[0][:12]}, more than {MAX_WIDTH}")


def longest_width(pattern: str) -> int:
    return max((int(digits[-9:]) for digits in re.findall(r"\d+", pattern)), default=0)


def replaced_size(text: Any, old: Any, new: Any) -> int:
    """What replacing adds to a text at the most."""
    return str(text).count(str(old)) * len(str(new))


def _check_numbers(operator: str, left: float, right: float) -> None:
    bits = [each.bit_length() if isinstance(each, int) else 0 for each in (left, right)]
    if operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 0 and bits[0] > 1:
        bits.append(bits[0] * right)
    if operator == "*":
        bits.append(sum(bits))
    if max(bits) > MAX_BITS:
        raise Refusal(f"the chat template calculates with numbers of more than {MAX_BITS} bits")
