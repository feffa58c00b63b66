"""A grid of settings on the simulator: throughput against p99 TTFT, what nothing beats, and what to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

from millpond.config import EngineConfig
from millpond.errors import ConfigError
from millpond.lab.cost_model import CostModel
from millpond.lab.latency import Slo
from millpond.lab.simulation_report import figures
from millpond.lab.simulator import Simulation, door_of, simulate
from millpond.lab.workload import WorkloadRequest, check_door

MOST_SETTINGS = 10_000
NEAR_BEST = 0.95  # of the best throughput: what lies above it is judged by p99 TTFT
SAME = 0.01  # figures that differ by less are taken for equal, and the smaller settings win


class Setting(NamedTuple):
    """One point of the grid. The pool is counted in positions, so that block sizes compare at the same memory."""

    pool_tokens: int
    slots: int
    budget: int
    block_size: int
    reserve: int

    @property
    def num_blocks(self) -> int:
        return self.pool_tokens // self.block_size

    def config(self) -> EngineConfig:
        return EngineConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.slots,
            max_num_batched_tokens=self.budget,
            watermark_blocks=self.reserve,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Every combination of these is tried. Raises ConfigError, naming the option, for one that cannot work."""

    pool_tokens: tuple[int, ...]
    slots: tuple[int, ...]
    budgets: tuple[int, ...]
    block_sizes: tuple[int, ...]
    reserves: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in zip(OPTIONS, self._axes(), strict=True):
            if not values:
                raise ConfigError(f"{name} must name at least one value")
            if len(set(values)) < len(values):
                raise ConfigError(f"{name} repeats a value: {','.join(map(str, values))}")
        if (count := prod(map(len, self._axes()))) > MOST_SETTINGS:
            raise ConfigError(f"{', '.join(OPTIONS)} make {count} settings, more than {MOST_SETTINGS}: name fewer")
        if min(self.budgets) < max(self.slots):
            raise ConfigError(
                f"--budgets {min(self.budgets)} is below --slots {max(self.slots)}: a step needs a token for each slot"
            )
        self._check_pools()

    def _check_pools(self) -> None:
        smallest, block_size, reserve = min(self.pool_tokens), max(self.block_sizes), max(self.reserves)
        if block_size > smallest:
            raise ConfigError(
                f"--block-sizes {block_size} is more than --pool-tokens {smallest}: there would be no block"
            )
        if min(self.reserves) < 0:
            raise ConfigError(f"--reserves must be at least 0, got {min(self.reserves)}")
        if reserve >= smallest // block_size:
            raise ConfigError(
                f"--reserves {reserve} leaves nothing of the {smallest // block_size} blocks that --pool-tokens "
                f"{smallest} makes with --block-sizes {block_size}"
            )

    def _axes(self) -> tuple[tuple[int, ...], ...]:
        return self.pool_tokens, self.slots, self.budgets, self.block_sizes, self.reserves

    @property
    def settings(self) -> list[Setting]:
        """In the order of the options, smallest first."""
        return [Setting(*values) for values in product(*map(sorted, self._axes()))]

    @property
    def swept(self) -> tuple[str, ...]:
        """The names of a setting's fields that have more than one value."""
        return tuple(name for name, values in zip(Setting._fields, self._axes(), strict=True) if len(values) > 1)


OPTIONS = ("--pool-tokens", "--slots", "--budgets", "--block-sizes", "--reserves")


@dataclass(frozen=True, slots=True)
class Point:
    """What one setting gave at one rate (None: a trace). Latencies in seconds, goodput_s in good requests a second."""

    setting: Setting
    rate: float | None
    output_tok_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p99: float
    preemptions: int
    used_share: float
    goodput_s: float | None

    @classmethod
    def of(cls, setting: Setting, rate: float | None, done: Simulation, slo: Slo) -> Point:
        found = figures(done.latencies, done.counters, slo)
        return cls(
            setting,
            rate,
            found["output_tok_s"],
            found["ttft_s"]["p50"],
            found["ttft_s"]["p99"],
            found["itl_s"].get("p99", 0.0),
            found["preemptions"],
            done.pool.mean_used_blocks / done.num_blocks,
            found["goodput"] and found["goodput"]["requests_s"],
        )

    def as_json(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in self.__slots__ if name != "setting"}
        return {**self.setting._asdict(), "num_blocks": self.setting.num_blocks, **figures}


def sweep_configs(
    grid: Grid,
    workloads: Mapping[float | None, Sequence[WorkloadRequest]],
    cost: CostModel,
    slo: Slo,
    notify: Callable[[str], None] = lambda name: None,
) -> list[Point]:
    """Run the workload of each rate at each setting. Raises ConfigError, before the first, where one cannot."""
    settings = grid.settings
    for setting, workload in product(settings, workloads.values()):
        check_door(workload, door_of(setting.config()))
    points = []
    for setting, (rate, workload) in product(settings, workloads.items()):
        notify(describe(setting, grid.swept))
        points.append(Point.of(setting, rate, simulate(workload, setting.config(), cost), slo))
    return points


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in throughput without being behind in p99 TTFT, by throughput."""
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.output_tok_s, each.ttft_p99)):
        if not front or point.ttft_p99 < front[-1].ttft_p99:
            front.append(point)
    return front[::-1]


def choose(points: Sequence[Point]) -> Point:
    """The most goodput where there is an SLO; else the least p99 TTFT of those within 5 % of the best throughput.

    What differs by less than 1 % is equal: then the smaller pool is taken, then fewer slots, and so on.
    """
    if points[0].goodput_s is not None:
        most = max(each.goodput_s or 0.0 for each in points)
        best = [each for each in points if (each.goodput_s or 0.0) >= (1 - SAME) * most]
    else:
        fastest = max(each.output_tok_s for each in points)
        near = [each for each in points if each.output_tok_s >= NEAR_BEST * fastest]
        least = min(each.ttft_p99 for each in near)
        best = [each for each in near if each.ttft_p99 <= (1 + SAME) * least]
    return min(best, key=lambda each: each.setting)


def advise(points: Sequence[Point], swept: Sequence[str]) -> str:
    """One line: which setting to take, what it gives, and what the fastest one would cost beside it."""
    chosen, fastest = choose(points), max(points, key=lambda each: (each.output_tok_s, -each.ttft_p99))
    share = chosen.output_tok_s / fastest.output_tok_s
    load = "" if chosen.rate is None else f"at {chosen.rate:g} requests a second "
    good = "" if chosen.goodput_s is None else f"{chosen.goodput_s:.2f} of them good, "
    line = (
        f"take {describe(chosen.setting, swept)}: {load}{good}{chosen.output_tok_s:,.0f} tok/s "
        f"({share:.0%} of the most) and a p99 TTFT of {chosen.ttft_p99:.2f} s"
    )
    if fastest.setting == chosen.setting or fastest.ttft_p99 <= (1 + SAME) * chosen.ttft_p99:
        return line
    return f"{line}; the most, with {describe(fastest.setting, swept)}, has {fastest.ttft_p99:.2f} s"


def describe(setting: Setting, swept: Sequence[str]) -> str:
    """A setting by its swept fields alone: "64 slots, budget 512". With none swept, the whole of it."""
    words = {
        "pool_tokens": f"a pool of {setting.pool_tokens:,} tokens",
        "slots": f"{setting.slots} slots",
        "budget": f"budget {setting.budget}",
        "block_size": f"blocks of {setting.block_size}",
        "reserve": f"reserve {setting.reserve}",
    }
    return ", ".join(words[name] for name in swept or words)
