"""What a run measures, and in which order: rounds outside, engines inside, each round beginning with another engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

GROUPS = ("decode", "prefill", "w1", "shared", "startup", "http", "poisson", "first-start", "quality")
MOST_START_ROUNDS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run's choices. Everything that its record needs to go on later with the rest."""

    contenders: tuple[str, ...]
    groups: tuple[str, ...]
    rounds: int = 3
    seed: int = 0
    decode: tuple[int, ...] = (1, 4, 16, 64)
    prefill: tuple[int, ...] = (128, 512, 1024, 4096)
    rates: tuple[float, ...] = (1.0, 3.0, 5.0)
    poisson_seconds: float = 12.0
    most_requests: int = 64  # of W1 and of the shared prefix; fewer are their first ones

    def __post_init__(self) -> None:
        unknown = set(self.groups) - set(GROUPS)
        if unknown:
            raise ValueError(f"no measurement is called {sorted(unknown)[0]!r}; there are {', '.join(GROUPS)}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Plan:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})


def quick(plan: Plan) -> Plan:
    """One short round of everything: to see that it works, not to compare."""
    record = plan.as_json() | {
        "rounds": 1,
        "decode": (1, 16),
        "prefill": (128, 512),
        "rates": (2.0,),
        "poisson_seconds": 5.0,
        "most_requests": 12,
    }
    return Plan(**record)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One thing to measure. phase says which kind of session it needs; round 0 warms up where warm_up says so."""

    key: str
    phase: str
    size: float
    rounds: int
    warm_up: bool

    @property
    def group(self) -> str:
        return self.key.partition("/")[0]


def measurements(plan: Plan) -> tuple[Measurement, ...]:
    """Everything that the plan measures in sessions, in the order of its phases."""
    offline = [Measurement(f"decode/{count}", "offline", count, plan.rounds, True) for count in plan.decode]
    offline += [Measurement(f"prefill/{length}", "offline", length, plan.rounds, True) for length in plan.prefill]
    offline.append(Measurement("w1/offline", "offline", 64, plan.rounds, True))
    starts = min(plan.rounds, MOST_START_ROUNDS)
    # Whatever ran before has filled the caches.
    is_warm = any(each.group in plan.groups for each in offline)
    servers = [Measurement("startup/warm", "server", 1, starts, not is_warm)]
    servers.append(Measurement("http/w1", "server", 64, plan.rounds, True))
    servers += [
        Measurement(f"poisson/{rate:g}", "server", rate, min(plan.rounds, MOST_START_ROUNDS), False)
        for rate in plan.rates
    ]
    everything = [
        *offline,
        Measurement("shared/512", "prefix", 512, plan.rounds, True),
        *servers,
        Measurement("first-start/empty", "first-start", 1, 1, False),
    ]
    return tuple(each for each in everything if each.group in plan.groups)


def turn(contenders: Sequence[T], round_: int) -> tuple[T, ...]:
    """The order of one round: each round begins with the next of them, so that nobody is always first or last."""
    first = round_ % len(contenders)
    return (*contenders[first:], *contenders[:first])


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement of one contender in one round; round 0 is the one that warms up."""

    measurement: Measurement
    contender: str
    round: int

    @property
    def counts(self) -> bool:
        return self.round > 0

    @property
    def key(self) -> tuple[str, str, int]:
        return self.measurement.key, self.contender, self.round


def jobs(some: Sequence[Measurement], contenders: Sequence[str]) -> Iterator[Job]:
    """Every job of one phase, in order: a round of everything before the next round of anything."""
    most = max((each.rounds for each in some), default=0)
    for round_ in range(most + 1):
        for each in some:
            if round_ <= each.rounds and (round_ or each.warm_up):
                for contender in turn(contenders, round_):
                    yield Job(each, contender, round_)
