"""SamplingParams: how to choose a request's tokens, when to stop, and what to tell of each choice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from millpond.errors import InvalidRequestError, shown

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 1000
MAX_BAD_WORDS = 128
MAX_BAD_CHARACTERS = 4096  # of all bad words together, which are tokenized between two steps
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SALT_CHARACTERS = 1000
SEED_BITS = 64
SEEDS = 2**SEED_BITS

_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Field names and meanings are those of the OpenAI and vLLM interfaces.

    max_tokens None means as many as fit. temperature 0 is greedy; top_k 0 or -1 keeps all tokens;
    seed None lets the engine draw one. n answers are drawn, number i with seed + i.
    allowed_token_ids None allows all; of bad_words none is generated, with or without a space before it, in the
    tokens that the tokenizer writes it with; logit_bias is added to the raw logits. With fewer than min_tokens tokens
    neither a stop token nor a stop string ends the answer. logprobs asks for the chosen token's log probability and
    those of so many of the likeliest, prompt_logprobs the same of the prompt; both are those of the raw logits.
    A request finds K/V of others in the prefix cache only where cache_salt is the same. embedding asks a model that is
    made for them for the prompt's, which comes with the first token.
    Raises InvalidRequestError naming the field.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    embedding: bool = False

    def __post_init__(self) -> None:
        self._take_lists()
        check_int("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None)
        check_int("min_tokens", self.min_tokens, 0, None)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, -1, None)
        check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), SEEDS - 1)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {shown(getattr(self, name))}", name)
        if self.cache_salt is not None:
            _check_salt(self.cache_salt)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})", "min_tokens"
            )

    def _take_lists(self) -> None:
        """Every list becomes a tuple that nobody can change any more."""
        for name in ("stop", "bad_words"):
            given = getattr(self, name)
            object.__setattr__(self, name, _as_tuple(name, (given,) if isinstance(given, str) else given))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_CHARACTERS)
        if (count := sum(map(len, self.bad_words))) > MAX_BAD_CHARACTERS:
            raise InvalidRequestError(
                f"bad_words may have at most {MAX_BAD_CHARACTERS} characters together, got {count}", "bad_words"
            )
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            allowed = _as_tuple("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
            _check_ids("allowed_token_ids", allowed, None)
            if not allowed:
                raise InvalidRequestError(
                    "allowed_token_ids must hold at least one id, or be left out", "allowed_token_ids"
                )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as pairs of an id and its bias, by rising id."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def wants_scores(self) -> bool:
        """Whether a step tells more of the request than its tokens: log probabilities, or an embedding."""
        return self.logprobs is not None or self.prompt_logprobs is not None or self.embedding

    def choices(self) -> tuple[SamplingParams, ...]:
        """One request's worth for each of the n answers: with a seed, answer i is what seed + i gives alone."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else (self.seed + index) % SEEDS for index in range(self.n)]
        return tuple(dataclasses.replace(self, n=1, seed=seed) for seed in seeds)


def _check_salt(salt: object) -> None:
    """Empty it would look like a secret and be everybody's."""
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        got = f"a string of {len(salt)}" if isinstance(salt, str) else shown(salt)
        message = f"cache_salt must be a string of 1 to {MAX_SALT_CHARACTERS} characters, got {got}"
        raise InvalidRequestError(message, "cache_salt")


def _as_tuple(name: str, listed: object) -> tuple[Any, ...]:
    if listed is None:
        return ()
    # Bytes and mappings have items too, but none that was meant.
    if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Iterable):
        raise InvalidRequestError(f"{name} must be a list, got {shown(listed)}", name)
    return tuple(listed)


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    """Pairs of an id and its bias, by rising id; they come as a mapping, or as what this returned before."""
    if given is None:
        return ()
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidRequestError(
            f"logit_bias must be a mapping of token ids to numbers, got {shown(given)}", "logit_bias"
        )
    for token_id, bias in pairs:
        check_int("logit_bias", token_id, 0, None, "an id of logit_bias")
        check_number("logit_bias", bias, -100.0, 100.0, what=f"logit_bias of id {token_id}")
    return tuple(sorted(pairs))


def check_texts(name: str, texts: object, most: int, most_characters: int) -> None:
    """Raise InvalidRequestError unless `texts` is a list of at most `most` texts that may be looked for."""
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, got {shown(texts)}", name)
    if len(texts) > most:
        raise InvalidRequestError(f"{name} may hold at most {most} items, got {len(texts)}", name)
    for text in texts:
        if not text:
            raise InvalidRequestError(f"{name} must hold non-empty strings, got {text!r}", name)
        if len(text) > most_characters:
            raise InvalidRequestError(
                f"{name} may hold strings of at most {most_characters} characters, got {len(text)}", name
            )
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequestError(f"{name} holds half of a surrogate pair, which is not valid Unicode", name)


def _check_ids(name: str, token_ids: tuple[object, ...], most: int | None) -> None:
    if most is not None and len(token_ids) > most:
        raise InvalidRequestError(f"{name} may hold at most {most} items, got {len(token_ids)}", name)
    for token_id in token_ids:
        check_int(name, token_id, 0, None)


def check_int(name: str, value: object, low: int | None, high: int | None, what: str = "") -> None:
    """Raise InvalidRequestError naming the field unless value is a whole number from low to high."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(f"{what or name} must be an integer, got {shown(value)}", name)
    if (low is not None and value < low) or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{what or name} must be {bound}, got {shown(value)}", name)


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False, what: str = "") -> None:
    """Raise InvalidRequestError naming the field unless value is a finite number from low, or above it, to high."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) == math.inf:
        raise InvalidRequestError(f"{what or name} must be a finite number, got {shown(value)}", name)
    if value > high or value < low or (above and value == low):
        bound = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise InvalidRequestError(f"{what or name} must be {bound}, got {shown(value)}", name)
