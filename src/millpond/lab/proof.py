"""The scheduler's invariants, checked in every reachable state of every small pool, and faults planted to be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from millpond.config import POLICIES
from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError
from millpond.lab.explorer import Explored, Explorer, Finding
from millpond.lab.faults import PlantedFault
from millpond.lab.story import tell
from millpond.lab.world import Case

# Far beyond what anybody waits for, and so small that what is set up before the first state is little.
MOST = {"positions": 12, "slots": 4, "requests": 6, "budget": 16, "guesses": 4}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Every scheduler up to these sizes is explored, without a budget of tokens per step and guesses and with them.

    positions bounds a pool's blocks times its block size. requests bounds how many are unfinished at any time: how
    many come in all is not bounded, nor, but by the pool, how long they are. With prefix_cache all
    schedulers have one, and some requests share their text. With a policy other than fcfs each has one of two
    priorities or tenants. With any_reserve the reserve is not one of each size, but chosen at will before each
    admission, which covers every rule where nobody is displaced. With whole_prompts none is cut. Raises ConfigError
    naming the option.
    """

    positions: int = 4
    slots: int = 2
    requests: int = 3
    budget: int = 2
    guesses: int = 1
    prefix_cache: bool = False
    policy: str = "fcfs"
    any_reserve: bool = False
    disk: bool = False
    whole_prompts: bool = False

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value, least = getattr(self, name), 0 if name in ("budget", "guesses") else 1
            if not least <= value <= most:
                raise ConfigError(f"--{name} must be from {least} to {most}, got {value}")
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.whole_prompts and (self.prefix_cache or self.guesses):
            raise ConfigError("--whole-prompts have no prefix cache, no disk and no guesses: leave them out")

    def within(
        self,
        policy: str,
        prefix_cache: bool,
        any_reserve: bool,
        given: Mapping[str, int | None],
        disk: bool = False,
        whole_prompts: bool = False,
    ) -> Bounds:
        """The same with a policy, with or without the prefix cache, a disk, which brings that along, a reserve chosen
        at will, and whole prompts, and with what is given instead of its own."""
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if whole_prompts:
            chosen.setdefault("guesses", 0)
        chosen |= {"prefix_cache": prefix_cache or disk, "any_reserve": any_reserve, "disk": disk}
        return replace(self, policy=policy, whole_prompts=whole_prompts, **chosen)

    def pools(self) -> Iterator[tuple[int, int]]:
        """Numbers of blocks and block sizes, the fewest positions first."""
        for positions in range(1, self.positions + 1):
            yield from ((positions // size, size) for size in range(1, positions + 1) if positions % size == 0)

    def cases_of(self, num_blocks: int, block_size: int) -> Iterator[Case]:
        """Every scheduler over a pool. More slots than requests would change nothing."""
        slots = range(1, min(self.slots, self.requests) + 1)
        budgets = (None, *range(1, self.budget + 1))
        for num_slots, reserve, budget, guesses in product(
            slots, (0,) if self.any_reserve else range(num_blocks), budgets, sorted({0, self.guesses})
        ):
            sizes = num_blocks, block_size, num_slots, reserve, budget, self.requests, guesses
            yield Case(
                *sizes,
                prefix_cache=self.prefix_cache,
                policy=self.policy,
                any_reserve=self.any_reserve,
                disk=self.disk,
                whole_prompts=self.whole_prompts,
            )


DEEP = Bounds(positions=5, slots=3, requests=3, budget=3, guesses=2)

# What can be found again, and in which order it goes, makes for many more states.
SHARING = Bounds(positions=3, slots=2, requests=2, budget=2, guesses=0, prefix_cache=True)

# And what a disk may answer for many more ways from each. A block behind one that was found takes three positions, and
# they take seconds with one slot and too long with two.
ON_DISK = Bounds(positions=2, slots=2, requests=2, budget=0, guesses=0, prefix_cache=True, disk=True)

# So does who goes before whom.
ORDERING = Bounds(positions=3, slots=2, requests=2, budget=1, guesses=0)

# A prompt that is whole is done with in one step: there are few states.
WHOLE = Bounds(budget=4, guesses=0, whole_prompts=True)
WHOLE_ORDERING = Bounds(positions=3, requests=2, budget=3, guesses=0, whole_prompts=True)

# Where the planted faults are looked for: the wall needs four blocks, and none needs more than two requests.
FAULT_BOUNDS = Bounds(positions=4, slots=2, requests=2, budget=1, guesses=0)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """What was explored of one pool: the schedulers over it, their states and transitions, the longest way to empty."""

    num_blocks: int
    block_size: int
    num_cases: int
    num_states: int
    num_transitions: int
    longest_drain: int


@dataclass(frozen=True, slots=True)
class Proof:
    """The rows of all pools, or of those before the one where a rule broke."""

    bounds: Bounds
    rows: tuple[PoolRow, ...]
    finding: Finding | None

    @property
    def num_states(self) -> int:
        return sum(row.num_states for row in self.rows)

    @property
    def num_transitions(self) -> int:
        return sum(row.num_transitions for row in self.rows)

    def as_json(self) -> dict[str, object]:
        return {
            "bounds": asdict(self.bounds),
            "pools": [asdict(row) for row in self.rows],
            "states": self.num_states,
            "transitions": self.num_transitions,
            "verdict": "broken" if self.finding else "holds",
            "finding": as_json(self.finding),
        }


def as_json(finding: Finding | None) -> dict[str, object] | None:
    """The case, the broken rule and the trace in words; None for none."""
    if finding is None:
        return None
    return {"case": str(finding.case), "message": finding.message, "trace": list(tell(finding))}


def prove(bounds: Bounds, notify: Callable[[str], None], kind: type[Scheduler] = Scheduler) -> Proof:
    """Explore every case within the bounds, up to the first broken rule. notify is called as each case starts."""
    rows: list[PoolRow] = []
    for num_blocks, block_size in bounds.pools():
        seen: list[Explored] = []
        for case in bounds.cases_of(num_blocks, block_size):
            notify(f"{num_blocks} blocks of {block_size}")
            seen.append(Explorer([case], kind).run())
            if seen[-1].finding is not None:
                return Proof(bounds, (*rows, _row(num_blocks, block_size, seen)), seen[-1].finding)
        rows.append(_row(num_blocks, block_size, seen))
    return Proof(bounds, tuple(rows), None)


def _row(num_blocks: int, block_size: int, seen: list[Explored]) -> PoolRow:
    states, transitions = (sum(getattr(each, name) for each in seen) for name in ("num_states", "num_transitions"))
    return PoolRow(num_blocks, block_size, len(seen), states, transitions, max(each.longest_drain for each in seen))


def num_cases(bounds: Bounds) -> int:
    """How many schedulers there are within the bounds."""
    return sum(len(list(bounds.cases_of(*pool))) for pool in bounds.pools())


def find(fault: PlantedFault, notify: Callable[[str], None]) -> Finding | None:
    """The shortest trace to a planted fault among all cases within FAULT_BOUNDS; None where it goes unseen."""
    notify(f"planted: {fault.name}")
    bounds = replace(FAULT_BOUNDS, prefix_cache=fault.prefix_cache, policy=fault.policy, disk=fault.disk)
    if fault.whole_prompts:
        bounds = replace(bounds, whole_prompts=True, budget=3)
    if fault.policy != "fcfs":
        bounds = replace(bounds, positions=fault.positions)
    cases = [case for pool in bounds.pools() for case in bounds.cases_of(*pool)]
    if fault.admissible_prompts:
        cases = [replace(case, longest_prompt=(case.num_blocks - case.reserve) * case.block_size) for case in cases]
    return Explorer(cases, fault.kind).run().finding
