"""Answers compared bit by bit, and where two of them differ first."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import zip_longest
from typing import Any, NamedTuple

from millpond.core.step import TokenScore
from millpond.lab.asking import Got


class Place(NamedTuple):
    """One token of an answer: its id, or its name over HTTP; its log probability; whatever else is told of it.

    Without a score, and for a prompt's tokens over HTTP, some of these are None.
    """

    token: int | str | None
    logprob: float | None = None
    more: tuple[Any, ...] = ()


@dataclass(slots=True)
class Told:
    """An answer as somebody was told it: place by place what the prompt and the output scored, the text, the end."""

    prompt: list[Place] = field(default_factory=list)
    output: list[Place] = field(default_factory=list)
    text: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer differs. where is prompt or output, whose positions count from 0, text or end."""

    request: str
    where: str
    position: int | None
    expected: Place | str | None
    got: Place | str | None

    def as_json(self) -> dict[str, Any]:
        sides = {"expected": _side(self.expected), "got": _side(self.got)}
        return {"request": self.request, "where": self.where, "position": self.position, **sides}


def _side(side: Place | str | None) -> Any:
    if not isinstance(side, Place):
        return side
    return {"token": side.token, "logprob": side.logprob, "bits": bits_of(side.logprob), "more": side.more}


def told_by(got: Got) -> Told:
    """What an engine's request was told."""
    # The token that came and the one that was scored are two things to go wrong.
    scores: Sequence[TokenScore | None] = got.scores or [None] * len(got.token_ids)
    output = [_place(token_id, score) for token_id, score in zip_longest(got.token_ids, scores)]
    prompt = [_place(score.token_id, score) for score in got.prompt_scores]
    return Told(prompt, output, got.text, f"{got.finish_reason}{': ' * bool(got.error)}{got.error or ''}")


def _place(token_id: int | None, score: TokenScore | None) -> Place:
    if score is None:
        return Place(token_id)
    scored = () if score.token_id == token_id else (f"scored is {score.token_id}",)
    return Place(token_id, score.logprob, (*scored, score.rank, *score.top))


def bits_of(number: float | None) -> str | None:
    """The 64 bits of a number, 16 hexadecimal digits."""
    return None if number is None else struct.pack(">d", number).hex()


def exact(value: Any) -> Any:
    """The same value with every number that is not whole as its bits: 0.0 is not -0.0, and NaN is itself."""
    if isinstance(value, float):
        return bits_of(value)
    return tuple([exact(each) for each in value]) if isinstance(value, tuple) else value


def first_difference(request: str, expected: Told, got: Told) -> Difference | None:
    """Where the two part, in the order in which they came to be; None where every bit is the same."""
    for where, ours, theirs in (("prompt", expected.prompt, got.prompt), ("output", expected.output, got.output)):
        for position, (one, other) in enumerate(zip_longest(ours, theirs)):
            if exact(one) != exact(other):
                return Difference(request, where, position + (where == "prompt"), one, other)
    for where in ("text", "end"):
        one, other = getattr(expected, where), getattr(got, where)
        if one != other:
            return Difference(request, where, None, one, other)
    return None


def fingerprint(answers: Mapping[str, Told]) -> str:
    """64 bits of a hash over every answer: equal where every bit is."""
    lines: Iterable[str] = (
        repr((name, exact(tuple(each.prompt)), exact(tuple(each.output)), each.text, each.end))
        for name, each in sorted(answers.items())
    )
    return sha256("\n".join(lines).encode()).hexdigest()[:16]
