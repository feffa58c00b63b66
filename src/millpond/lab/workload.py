"""Seeded workloads: the same requests for everyone who asks with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from random import Random

from millpond.core.door import Door
from millpond.errors import ConfigError, InvalidRequestError

MOST_REQUESTS = 1_000_000
MOST_SECONDS = 1e7  # from the first arrival to the last: beyond it a clock of 64 bits loses microseconds
MOST_TOKENS = 1 << 26  # of prompts and outputs together: what is more takes gigabytes and hours


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload: when it comes (seconds from the start), what it asks, how many tokens it takes.

    priority and tenant are what a policy other than fcfs orders by.
    """

    arrival: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    tenant: str = ""


def check_size(num_requests: int, num_tokens: int) -> None:
    """Raise ConfigError for a workload of more requests or tokens than memory is meant for."""
    if num_requests > MOST_REQUESTS:
        raise ConfigError(
            f"a workload has at most {MOST_REQUESTS} requests, got {num_requests}; take fewer (--requests)"
        )
    if num_tokens > MOST_TOKENS:
        raise ConfigError(
            f"a workload has at most {MOST_TOKENS} tokens, got {num_tokens} in {num_requests} requests; take fewer "
            f"(--requests) or shorter ones (--prompt-tokens, --max-tokens)"
        )


def check_door(workload: Sequence[WorkloadRequest], door: Door) -> None:
    """Raise ConfigError for a request that could never run. The door looks at lengths: the longest speaks for all."""
    lengths = [(len(each.prompt_token_ids) + each.max_tokens, each) for each in workload]
    _, longest = max(lengths, key=itemgetter(0))
    try:
        door.check(len(longest.prompt_token_ids), longest.max_tokens)
    except InvalidRequestError as error:
        raise ConfigError(f"the longest request could never run: {error}; or give the pool more blocks") from error


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
