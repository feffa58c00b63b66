"""How long a step takes, from what it is made of: a sum of parts, fitted to the recorded steps of a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.errors import ConfigError
from millpond.lab.step_record import LEAST_SECONDS, StepRecord, StepShape

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

FEWEST_STEPS = 20
DISTURBED = 1.3  # times the fitted seconds: a step beyond it had to share its cores with something else
MOST_ROUNDS = 20

StepCosts = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: `fixed`, and `each` for every unit of its shape. source says where they come from.

    num_steps, num_disturbed of them left out, and median_error are those of the fit: a step's error as a share of what
    it took.
    """

    fixed: float
    each: StepCosts
    source: str
    num_steps: int = 0
    num_disturbed: int = 0
    median_error: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        # Written out: a loop over five pairs takes four times as long, and it is done for every step.
        a, b, c, d, e = self.each
        return self.fixed + a * shape[0] + b * shape[1] + c * shape[2] + d * shape[3] + e * shape[4]

    def as_json(self) -> dict[str, object]:
        """Microseconds by part, and how well they fit."""
        parts = {"fixed": self.fixed, **dict(zip(StepShape._fields, self.each, strict=True))}
        return {
            "source": self.source,
            "microseconds": {name: round(1e6 * seconds, 4) for name, seconds in parts.items()},
            "num_steps": self.num_steps,
            "num_disturbed": self.num_disturbed,
            "median_error": round(self.median_error, 4),
        }


# SmolLM2-135M-Instruct Q4_1 on two cores of a Zen 4 server with AVX512, fitted as below.
BUILT_IN = CostModel(2.84e-3, (0.0, 0.36e-3, 0.0, 1.81e-6, 0.24e-6), "built in (SmolLM2-135M, two cores)")


def fit(records: Sequence[StepRecord], source: str) -> CostModel:
    """The cost model that fits the records best, no part of it below 0. Raises ConfigError for too few of them.

    Weighted least squares: what disturbs a step comes the more often the longer it takes, so its variance is taken to
    grow with the fitted seconds. Steps that took DISTURBED times as long as fitted are left out, and the rest is fitted
    again until nothing changes: noise on a machine only ever makes a step longer.
    """
    if len(records) < FEWEST_STEPS:
        raise ConfigError(f"{source} holds {len(records)} steps; a cost model needs at least {FEWEST_STEPS}")
    import numpy

    features = numpy.array([(1.0, *shape) for shape, _ in records], numpy.float64)
    seconds = numpy.array([seconds for _, seconds in records], numpy.float64)
    kept, fitted = numpy.ones(len(records), bool), seconds
    for _ in range(MOST_ROUNDS):
        before = fitted
        costs = _nonnegative(features[kept], seconds[kept], 1.0 / numpy.sqrt(fitted[kept].clip(LEAST_SECONDS)))
        fitted = features @ costs
        kept = seconds <= DISTURBED * fitted
        if numpy.allclose(fitted, before, rtol=1e-6, atol=0.0):
            break
    error = float(numpy.median(abs(fitted / seconds - 1.0)))
    fixed, a, b, c, d, e = costs.tolist()
    return CostModel(fixed, (a, b, c, d, e), source, len(records), int((~kept).sum()), error)


def _nonnegative(features: NDArray[float64], seconds: NDArray[float64], weights: NDArray[float64]) -> NDArray[float64]:
    """Weighted least squares; what comes out below 0 is left out, the one that takes most off first."""
    import numpy

    kept = [index for index in range(features.shape[1]) if features[:, index].any()]
    while True:
        chosen = features[:, kept] * weights[:, None]
        # Columns of one length: where the steps cannot tell parts apart, each gets its share, not the largest all.
        lengths = numpy.linalg.norm(chosen, axis=0)
        share = numpy.linalg.lstsq(chosen / lengths, seconds * weights, rcond=None)[0]
        if not (share < 0.0).any():
            break
        del kept[int(share.argmin())]
    every = numpy.zeros(features.shape[1])
    every[kept] = share / lengths
    return every
