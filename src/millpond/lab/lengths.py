"""How long the requests of a workload are, in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

LONGEST = 1 << 20  # tokens; no model takes more
WIDEST = 10.0  # of a lognormal spread: beyond it every length is one of the ends


@dataclass(frozen=True, slots=True)
class Lengths:
    """The choices in turn; or drawn from them, evenly or, with a median, lognormally around it and cut at their ends.

    sigma is the standard deviation of the logarithm.
    """

    choices: Sequence[int]
    drawn: bool = False
    median: int = 0
    sigma: float = 0.0

    def __str__(self) -> str:
        """As the command takes it."""
        if self.median:
            return f"lognormal:{self.median}:{self.sigma:g}:{self.choices[-1]}"
        return f"{self.choices[0]}-{self.choices[-1]}" if self.drawn else ",".join(map(str, self.choices))

    @property
    def longest(self) -> int:
        return max(self.choices)

    def of(self, num_requests: int, random: Random) -> list[int]:
        if self.median:
            return [self._around_median(random) for _ in range(num_requests)]
        if self.drawn:
            return [random.choice(self.choices) for _ in range(num_requests)]
        return [self.choices[index % len(self.choices)] for index in range(num_requests)]

    def _around_median(self, random: Random) -> int:
        length = round(self.median * math.exp(random.gauss(0.0, self.sigma)))
        return min(self.choices[-1], max(self.choices[0], length))
