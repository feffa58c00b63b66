"""A request: what was asked, what exists so far, and the states it may pass through."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from millpond.errors import InvalidRequestError, InvariantError

MOST_SALT_CHARACTERS = 1000
NEVER = sys.maxsize


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


LEGAL_EDGES: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Field names and meanings are those of the OpenAI and vLLM interfaces.

    max_tokens None means as many as fit. temperature 0 is greedy; top_k 0 or -1 keeps all tokens;
    seed None lets the engine draw one. A request finds K/V of others in the prefix cache only where cache_salt is the
    same. Raises InvalidRequestError naming the field.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, -1, None)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop must hold non-empty strings, got {text!r}", "stop")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, None)
        if self.cache_salt is not None:
            _check_salt(self.cache_salt)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r}", name)


def _check_salt(salt: object) -> None:
    """Empty it would look like a secret and be everybody's."""
    if not isinstance(salt, str) or not 1 <= len(salt) <= MOST_SALT_CHARACTERS:
        got = f"a string of {len(salt)}" if isinstance(salt, str) else f"{salt!r:.100}"
        message = f"cache_salt must be a string of 1 to {MOST_SALT_CHARACTERS} characters, got {got}"
        raise InvalidRequestError(message, "cache_salt")


def _as_tuple(name: str, listed: object) -> tuple[Any, ...]:
    if listed is None:
        return ()
    # Bytes and mappings have items too, but none that was meant.
    if isinstance(listed, bytes | Mapping) or not isinstance(listed, Iterable):
        raise InvalidRequestError(f"{name} must be a list, got {listed!r}", name)
    return tuple(listed)


def _check_int(name: str, value: object, low: int | None, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", name)
    if (low is not None and value < low) or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} must be {bound}, got {value}", name)


def _check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) == math.inf:
        raise InvalidRequestError(f"{name} must be a finite number, got {value!r}", name)
    if value > high or value < low or (above and value == low):
        bound = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise InvalidRequestError(f"{name} must be {bound}, got {value!r}", name)


@dataclass(slots=True, eq=False)
class Request:
    """One request as the scheduler sees it.

    max_tokens, stop_token_ids and seed are resolved by the engine before the scheduler sees them:
    max_tokens fits the pool, stop_token_ids holds the end-of-text ids unless they are ignored.
    block_ids[i] holds the K/V of positions i * block_size to (i + 1) * block_size - 1.
    draft_token_ids are guesses of the tokens to come, there while the step that tries them is in flight.
    reads_prefix_cache False computes every position, whatever could be found. num_cached_tokens were found when it was
    admitted last; block_keys are the prefix cache's keys of its full blocks, as far as they were asked for; its next
    block becomes findable once publish_at tokens are computed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_preemptions: int = 0
    num_tokens_at_admission: int = 0
    draft_token_ids: tuple[int, ...] = ()
    reads_prefix_cache: bool = True
    num_cached_tokens: int = 0
    block_keys: list[int] = field(default_factory=list)
    publish_at: int = NEVER

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def token_ids_between(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens at positions start to end - 1, over the prompt and what was generated."""
        prompt = self.prompt_token_ids
        if start >= len(prompt):
            return tuple(self.output_token_ids[start - len(prompt) : end - len(prompt)])
        return prompt[start:end] + tuple(self.output_token_ids[: max(0, end - len(prompt))])

    def move_to(self, state: RequestState) -> None:
        """Follow one edge of the table; anything else is a bug and raises InvariantError."""
        if state not in LEGAL_EDGES[self.state]:
            raise InvariantError(f"request {self.request_id}: {self.state.value} -> {state.value} is not a legal edge")
        self.state = state
