"""The reserve that chooses itself against every fixed one, on unlike workloads: `millpond sweep reserve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from random import Random
from typing import NamedTuple

from millpond.config import AUTO
from millpond.errors import ConfigError
from millpond.lab.batchbench import WatermarkSweep, sweep_watermarks
from millpond.lab.lengths import Lengths
from millpond.lab.workload import WorkloadRequest

BLOCK_SIZE, SLOTS, STEP_TOKENS = 16, 32, 512
FINEST = 32  # of the pool, between two fixed reserves up to a half of it; above, twice as much


class Kind(NamedTuple):
    """A sort of traffic: so many requests by a seed, and the pool that is tight for them."""

    num_blocks: int
    requests: Callable[[int, Random], list[WorkloadRequest]]


def _between(shortest: int, longest: int) -> Lengths:
    return Lengths(range(shortest, longest + 1), drawn=True)


SHORT, MEDIUM, LONG = _between(16, 64), _between(128, 256), _between(256, 768)
HEAVY_TAILED = Lengths(range(1, 1025), drawn=True, median=48, sigma=1.2)


def _drawn(
    prompts: Lengths, outputs: Lengths, random: Random, count: int, arrival: float = 0.0
) -> list[WorkloadRequest]:
    lengths = zip(prompts.of(count, random), outputs.of(count, random), strict=True)
    return [WorkloadRequest(arrival, (0,) * prompt, output) for prompt, output in lengths]


def _shift(count: int, random: Random) -> list[WorkloadRequest]:
    half = count // 2
    stories = _drawn(SHORT, _between(150, 250), random, half)
    return stories + _drawn(MEDIUM, _between(16, 64), random, count - half)


def _bursts(count: int, random: Random) -> list[WorkloadRequest]:
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(random.randint(20, 60), count - sum(sizes)))
    times = accumulate((random.uniform(15.0, 35.0) for _ in sizes[1:]), initial=0.0)
    bursts = [_drawn(SHORT, _between(140, 180), random, *each) for each in zip(sizes, times, strict=True)]
    return [request for burst in bursts for request in burst]


KINDS: Mapping[str, Kind] = {
    "bursts": Kind(128, _bursts),
    "shift": Kind(128, _shift),
    "equal": Kind(160, lambda count, random: _drawn(_between(32, 160), Lengths((192,)), random, count)),
    "tails": Kind(128, lambda count, random: _drawn(SHORT, HEAVY_TAILED, random, count)),
    "documents": Kind(256, lambda count, random: _drawn(LONG, _between(8, 64), random, count)),
}


@dataclass(frozen=True, slots=True)
class Result:
    """The work of all seeds together, under auto and under each fixed reserve, in blocks."""

    kind: str
    auto_work: int
    fixed_work: Mapping[int, int]

    @property
    def best_reserve(self) -> int:
        """The fixed one of the least work, the smallest of equals."""
        return min(self.fixed_work, key=lambda reserve: (self.fixed_work[reserve], reserve))

    @property
    def difference(self) -> float:
        """Auto's work against the best fixed reserve's, as a share; below 0 auto wins."""
        return self.auto_work / self.fixed_work[self.best_reserve] - 1.0

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "best_reserve": self.best_reserve, "difference": round(self.difference, 4)}


def fixed_reserves(num_blocks: int) -> list[int]:
    """From nothing to all but a little of the pool, finer in its first half."""
    fine, half = num_blocks // FINEST, num_blocks // 2
    return [*range(0, half, fine), *range(half, num_blocks, 2 * fine)]


def contest(
    name: str,
    seeds: Sequence[int],
    num_requests: int,
    reserves: Sequence[int] | None = None,
    notify: Callable[[str], None] = lambda name: None,
) -> Result:
    """One kind of traffic under auto and each fixed reserve. Raises ConfigError where there is nothing to run."""
    if name not in KINDS:
        raise ConfigError(f"there is no kind of traffic {name!r}: name some of {', '.join(KINDS)}")
    kind = KINDS[name]
    fixed = fixed_reserves(kind.num_blocks) if reserves is None else reserves
    auto_work, fixed_work = 0, dict.fromkeys(fixed, 0)
    for seed in seeds:
        sweep = WatermarkSweep(
            requests=kind.requests(num_requests, Random(seed)),
            num_blocks=kind.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=STEP_TOKENS,
        )
        auto, *others = sweep_watermarks(sweep, [AUTO, *fixed], lambda reserve: notify(f"{name}, {reserve}"))
        auto_work += auto.work
        for reserve, point in zip(fixed, others, strict=True):
            fixed_work[reserve] += point.work
    return Result(name, auto_work, fixed_work)
