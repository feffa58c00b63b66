"""Seeded workloads: the same requests for everyone who asks with the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload: when it comes (seconds from the start), what it asks, how many tokens it takes."""

    arrival: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


def random_prompt(random: Random, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """num_tokens token ids, each drawn evenly from 0 to vocab_size - 1."""
    return tuple(random.randrange(vocab_size) for _ in range(num_tokens))


def all_at_once(
    *,
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> tuple[WorkloadRequest, ...]:
    """Requests that all come at time 0; prompt and output lengths are drawn evenly from the inclusive ranges."""
    random = Random(seed)
    requests = []
    for _ in range(num_requests):
        prompt = random_prompt(random, random.randint(*prompt_tokens), vocab_size)
        requests.append(WorkloadRequest(0.0, prompt, random.randint(*output_tokens)))
    return tuple(requests)


def w1(vocab_size: int, seed: int = 0) -> tuple[WorkloadRequest, ...]:
    """W1, the mixed workload: 64 requests at once, prompts of 32 to 256 tokens, outputs of 16 to 128."""
    return all_at_once(
        num_requests=64, prompt_tokens=(32, 256), output_tokens=(16, 128), vocab_size=vocab_size, seed=seed
    )
