"""Medians, spreads and percentiles of raw figures. Plain arithmetic, so that it can be tested with no engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Summary:
    """The median of several rounds, with the least and the largest of them."""

    median: float
    least: float
    most: float
    rounds: int

    @property
    def spread(self) -> float:
        """(most - least) / median: 0.1 says that the rounds lie within 10 % of the median of one another."""
        return (self.most - self.least) / self.median if self.median else 0.0


def summarize(values: Sequence[float]) -> Summary:
    """Raises ValueError where there is no value."""
    if not values:
        raise ValueError("no values to summarize")
    return Summary(median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least percent % of the values do not exceed (nearest rank). Raises ValueError where
    there is no value or percent is not above 0 and at most 100."""
    if not values:
        raise ValueError("no values to take a percentile of")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be above 0 and at most 100, got {percent}")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def ratio(ours: float, others: Sequence[float], *, more_is_better: bool) -> float | None:
    """How many times better ours is than the best of the others: above 1 is ahead. None where there is nobody else."""
    if not others:
        return None
    if more_is_better:
        return ours / max(others)
    return min(others) / ours if ours else None
