"""Seeded traffic: requests that come one after another, with lengths drawn from a distribution."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from millpond.errors import ConfigError
from millpond.lab.workload import WorkloadRequest, random_prompt

_EVEN = re.compile(r"(\d+)(?:-(\d+))?")
_LOGNORMAL = re.compile(r"lognormal:(\d+):(\d*\.?\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths in tokens from least to most: each as likely as the others or, with a median, lognormal around it."""

    least: int
    most: int
    median: int = 0
    sigma: float = 0.0

    def draw(self, random: Random) -> int:
        if not self.median:
            return random.randint(self.least, self.most)
        return min(self.most, max(self.least, round(self.median * math.exp(random.gauss(0.0, self.sigma)))))


def parse_lengths(text: str, name: str) -> LengthDistribution:
    """Lengths from "128", "32-256" or "lognormal:MEDIAN:SIGMA:MOST". Raises ConfigError naming the option."""
    if match := _EVEN.fullmatch(text.strip()):
        found = LengthDistribution(int(match[1]), int(match[2] or match[1]))
        ends = found.least, found.most
    elif match := _LOGNORMAL.fullmatch(text.strip()):
        found = LengthDistribution(1, int(match[3]), int(match[1]), float(match[2]))
        ends = found.median, found.most
    else:
        raise ConfigError(f"{name} is 128, 32-256 or lognormal:MEDIAN:SIGMA:MOST, got {text!r}")
    if not 1 <= ends[0] <= ends[1]:
        raise ConfigError(f"{name} must be at least 1 token and go upwards, got {text!r}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How requests come: rate a second on average (inf: all at once), and how unevenly.

    burstiness is the coefficient of variation of the gaps, which are gamma distributed: 0 is a metronome, 1 Poisson,
    and above it requests come in bunches.
    """

    num_requests: int
    rate: float
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ConfigError(f"the number of requests must be at least 1, got {self.num_requests}")
        if not self.rate > 0.0:
            raise ConfigError(f"the rate must be above 0 requests a second, got {self.rate:g}")
        if not 0.0 <= self.burstiness < math.inf:
            raise ConfigError(f"the burstiness must be 0 or more, got {self.burstiness:g}")

    def requests(self) -> tuple[WorkloadRequest, ...]:
        """The workload. Prompts repeat one token: requests of one length share one prompt, so that many are small."""
        random, arrival = Random(self.seed), 0.0
        prompts: dict[int, tuple[int, ...]] = {}
        requests = []
        for _ in range(self.num_requests):
            length = self.prompt_tokens.draw(random)
            prompt = prompts.setdefault(length, (0,) * length)
            requests.append(WorkloadRequest(arrival, prompt, self.output_tokens.draw(random)))
            arrival += self._gap(random)
        return tuple(requests)

    def _gap(self, random: Random) -> float:
        if math.isinf(self.rate):
            return 0.0
        if self.burstiness == 0.0:
            return 1.0 / self.rate
        variance = self.burstiness**2
        return random.gammavariate(1.0 / variance, variance / self.rate)


def with_random_prompts(workload: Sequence[WorkloadRequest], vocab_size: int, seed: int) -> tuple[WorkloadRequest, ...]:
    """The same workload for a real model: prompts of the same lengths, of random tokens."""
    random = Random(seed)
    return tuple(
        dataclasses.replace(each, prompt_token_ids=random_prompt(random, len(each.prompt_token_ids), vocab_size))
        for each in workload
    )
