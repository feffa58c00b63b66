"""The seeded workloads that every engine gets: token ids only, the same for all, other ones in each round."""

from __future__ import annotations

from random import Random

from millpond.lab.workload import WorkloadRequest, random_prompt, w1

DECODE_PROMPT_TOKENS = 128
DECODE_STEPS = 64
PROMPT_TOKENS = (32, 256)
OUTPUT_TOKENS = (16, 128)
SHARED_REQUESTS = 16
SHARED_PREFIX_TOKENS = 512
SHARED_OWN_TOKENS = 32
SHARED_OUTPUT_TOKENS = 64


def _random(seed: int, *names: object) -> Random:
    """A generator of its own for each workload, size and round. A string seed is hashed the same in every process."""
    return Random("/".join(map(str, (seed, *names))))


def decode_prompts(num_sequences: int, vocab_size: int, seed: int, round_: int) -> list[list[int]]:
    random = _random(seed, "decode", num_sequences, round_)
    return [list(random_prompt(random, DECODE_PROMPT_TOKENS, vocab_size)) for _ in range(num_sequences)]


def prefill_request(length: int, vocab_size: int, seed: int, round_: int) -> WorkloadRequest:
    """One prompt that is over with its first output token."""
    return WorkloadRequest(0.0, random_prompt(_random(seed, "prefill", length, round_), length, vocab_size), 1)


def w1_requests(vocab_size: int, seed: int, round_: int) -> tuple[WorkloadRequest, ...]:
    """W1 with other prompts in each round, so that nothing is left from the last one in anyone's prefix cache."""
    return w1(vocab_size, seed + 1000 * round_)


def poisson_requests(
    rate: float, seconds: float, vocab_size: int, seed: int, round_: int
) -> tuple[WorkloadRequest, ...]:
    """Requests that come at random, rate of them a second on average, for so many seconds; lengths as in W1.

    The gaps are exponentially distributed. There is at least one request.
    """
    if rate <= 0 or seconds <= 0:
        raise ValueError(f"rate and seconds must be above 0, got {rate} and {seconds}")
    random = _random(seed, "poisson", rate, round_)
    requests = []
    arrival = 0.0
    while not requests or arrival < seconds:
        prompt = random_prompt(random, random.randint(*PROMPT_TOKENS), vocab_size)
        requests.append(WorkloadRequest(arrival, prompt, random.randint(*OUTPUT_TOKENS)))
        arrival += random.expovariate(rate)
    return tuple(requests)


def shared_prefix_requests(vocab_size: int, seed: int, round_: int) -> tuple[WorkloadRequest, ...]:
    """16 requests at once: the same first 512 tokens for all (others in each round), then 32 tokens of their own."""
    random = _random(seed, "shared", round_)
    prefix = random_prompt(random, SHARED_PREFIX_TOKENS, vocab_size)
    return tuple(
        WorkloadRequest(0.0, prefix + random_prompt(random, SHARED_OWN_TOKENS, vocab_size), SHARED_OUTPUT_TOKENS)
        for _ in range(SHARED_REQUESTS)
    )
