"""The requests of a determinism check: every way to sample, texts that begin alike, lengths at the edges of blocks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from millpond.core.sampling import SEEDS, SamplingParams
from millpond.lab.asking import Ask
from millpond.lab.workload import random_prompt

NUM_TOP = 5  # logprobs of so many of the likeliest
NUM_TEXTS = 3  # that prompts begin with
LEAST_OUTPUT = 2  # tokens
EDGES = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49)
LARGEST_SEEDS = (0, SEEDS - 1, -(2**63))


def _drawn(random: Random) -> dict[str, Any]:
    return {
        "temperature": random.choice((0.2, 0.7, 1.0, 1.6)),
        "top_p": random.choice((1.0, 0.95, 0.7)),
        "top_k": random.choice((0, 40, 3)),
    }


def _penalties(random: Random) -> dict[str, Any]:
    return {
        "temperature": random.choice((0.0, 0.8)),
        "repetition_penalty": random.choice((1.1, 1.5)),
        "presence_penalty": random.choice((0.0, 0.6)),
        "frequency_penalty": random.choice((0.0, 0.4)),
    }


def _masked(random: Random, vocab_size: int) -> dict[str, Any]:
    some = tuple(sorted({random.randrange(vocab_size) for _ in range(40)}))
    return {
        "temperature": random.choice((0.0, 1.0)),
        "bad_words": ("the", "a"),
        "min_tokens": LEAST_OUTPUT,
        "logit_bias": {token_id: random.choice((-2.5, 3.0)) for token_id in some[:10]},
        "allowed_token_ids": random.choice((None, some)),
    }


def kinds_of(vocab_size: int) -> dict[str, Callable[[Random], dict[str, Any]]]:
    """What each kind of request sets, in the order in which they take turns; "plain" ones ask for no logprobs."""
    return {
        "greedy": lambda random: {"temperature": 0.0},
        "seeded": _drawn,
        "choices": lambda random: {**_drawn(random), "n": 3},
        "penalties": _penalties,
        "min_p": lambda random: {"temperature": 1.2, "min_p": random.choice((0.02, 0.2))},
        "masked": lambda random: _masked(random, vocab_size),
        "scored": lambda random: {"temperature": random.choice((0.0, 0.9)), "prompt_logprobs": 2},
        "plain": lambda random: random.choice(({"temperature": 0.0}, _drawn(random), _penalties(random))),
    }


def draw_asks(seed: int, num_requests: int, *, prompt_tokens: int, max_tokens: int, vocab_size: int) -> dict[str, Ask]:
    """So many requests by name, of prompts of up to prompt_tokens and outputs of up to max_tokens tokens; the same ones
    for the same numbers, and the first ones of more of them.

    Every second prompt begins as others do, some are a few tokens over and over, the rest have nothing in common.
    """
    texts = [random_prompt(Random(f"{seed}/text {index}"), prompt_tokens, vocab_size) for index in range(NUM_TEXTS)]
    kinds = list(kinds_of(vocab_size).items())
    asks = {}
    for index in range(num_requests):
        random, (kind, settings) = Random(f"{seed}/request {index}"), kinds[index % len(kinds)]
        sampling = SamplingParams(
            max_tokens=random.randint(max(LEAST_OUTPUT, max_tokens // 3), max_tokens),
            seed=random.choice((*LARGEST_SEEDS, *(random.getrandbits(63) for _ in range(9)))),
            ignore_eos=random.random() < 0.8,
            logprobs=None if kind == "plain" else NUM_TOP,
            **settings(random),
        )
        prompt = _prompt(random, texts, prompt_tokens, vocab_size)
        asks[f"r{index}"] = Ask(prompt, sampling, kind)
    return asks


def _prompt(random: Random, texts: list[tuple[int, ...]], longest: int, vocab_size: int) -> tuple[int, ...]:
    length = random.choice((random.choice(EDGES), random.randint(1, longest), random.randint(longest // 2, longest)))
    length = max(1, min(length, longest))
    own = random_prompt(random, length, vocab_size)
    shape = random.choice(("shared", "shared", "repeated", "own"))
    if shape == "shared":
        num_shared = random.choice((length, random.randint(length // 2, length)))
        return random.choice(texts)[:num_shared] + own[num_shared:]
    if shape == "repeated":
        return (own[: random.randint(1, 5)] * length)[:length]
    return own
