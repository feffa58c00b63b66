"""Seeded traffic: requests that come one after another, with lengths drawn from a distribution."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from millpond.errors import ConfigError
from millpond.lab.lengths import Lengths
from millpond.lab.workload import MOST_SECONDS, WorkloadRequest, check_size, random_prompt

LEAST_BURSTINESS, MOST_BURSTINESS = 0.01, 100.0  # what a gamma distribution of 64 bits can tell apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How requests come: rate a second on average (inf: all at once), and how unevenly.

    burstiness is the coefficient of variation of the gaps, which are gamma distributed: 0 is a metronome, 1 Poisson,
    and above it requests come in bunches. Raises ConfigError naming the command's option.
    """

    num_requests: int
    prompt_tokens: Lengths
    max_tokens: Lengths
    rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ConfigError(f"the number of requests (--requests) must be at least 1, got {self.num_requests}")
        if not self.rate > 0.0:
            raise ConfigError(f"the rate (--rate) must be above 0 requests a second, got {self.rate:g}")
        if self.burstiness != 0.0 and not LEAST_BURSTINESS <= self.burstiness <= MOST_BURSTINESS:
            raise ConfigError(
                f"the burstiness (--burstiness) must be 0, or from {LEAST_BURSTINESS:g} to {MOST_BURSTINESS:g}, "
                f"got {self.burstiness:g}"
            )
        if (seconds := self.num_requests / self.rate) > MOST_SECONDS:
            raise ConfigError(
                f"{self.num_requests} requests (--requests) take {seconds:g} seconds to come at {self.rate:g} a second "
                f"(--rate), more than {MOST_SECONDS:g}: raise the rate or take fewer"
            )

    def requests(self) -> tuple[WorkloadRequest, ...]:
        """The workload: lengths first, so that they are the same at every rate. Raises ConfigError for too large a one.

        Prompts repeat one token: requests of one length share one prompt, so that many are small.
        """
        check_size(self.num_requests, 0)
        random = Random(self.seed)
        prompts, outputs = (each.of(self.num_requests, random) for each in (self.prompt_tokens, self.max_tokens))
        check_size(self.num_requests, sum(prompts) + sum(outputs))
        shared = {length: (0,) * length for length in set(prompts)}
        arrivals = accumulate((self._gap(random) for _ in prompts[1:]), initial=0.0)
        return tuple(
            WorkloadRequest(arrival, shared[prompt], output)
            for arrival, prompt, output in zip(arrivals, prompts, outputs, strict=True)
        )

    def _gap(self, random: Random) -> float:
        if math.isinf(self.rate):
            return 0.0
        if self.burstiness == 0.0:
            return 1.0 / self.rate
        variance = self.burstiness**2
        return random.gammavariate(1.0 / variance, variance / self.rate)


def with_random_prompts(workload: Sequence[WorkloadRequest], vocab_size: int, seed: int) -> tuple[WorkloadRequest, ...]:
    """The same workload with prompts of the same lengths, of random tokens."""
    random = Random(seed)
    return tuple(
        dataclasses.replace(each, prompt_token_ids=random_prompt(random, len(each.prompt_token_ids), vocab_size))
        for each in workload
    )
