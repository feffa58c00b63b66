"""Policies: who of the waiting is next, in which order the running go, and who may take another's place.

The scheduler keeps the running in the order of their ranks: it grows and serves the first one first, and the last one
is its victim. A policy gives the ranks, names the head of the waiting, and says whom a head may preempt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from millpond.core.fair_shares import MOST_TURNS, QUANTUM, Fair
from millpond.core.request import Request

AGEING_STEPS = 100
MOST_PRIORITY = 1000  # a request has waited longest after 2 * MOST_PRIORITY * AGEING_STEPS
RANK = attrgetter("rank")

Waiting = OrderedDict[str, Request]


class Policy(Protocol):
    """What the scheduler asks and tells. Waiting is all that waits, by id, whom a policy need not keep in order.

    A running request's rank changes in arrange() alone. may_preempt False promises that outranks() never holds.
    """

    @property
    def may_preempt(self) -> bool: ...

    def enter(self, request: Request, step: int) -> None:
        """A new request waits; step is the next one's number."""

    def put_back(self, request: Request) -> None:
        """A running request was preempted and waits again."""

    def head(self, waiting: Waiting) -> Request:
        """Who is next, of at least one, with the rank that it would run with. Asking changes no later answer."""

    def outranks(self, head: Request, running: Request) -> bool:
        """Whether the head may have a running request of a larger rank preempted."""

    def start(self, request: Request) -> None:
        """The head runs from now on."""

    def leave(self, request: Request, was_running: bool) -> None:
        """A request has ended."""

    def arrange(self, running: list[Request]) -> None:
        """A step begins: bring the running, whose ranks may change now, into order."""

    def first(self, unfinished: Iterable[Request]) -> Request | None:
        """Whom this step may neither preempt nor leave standing; None where it is only promised that somebody runs."""

    def lines(self, waiting: Waiting) -> Sequence[Sequence[Request]]:
        """All that wait, each of the lines in which they are kept in its order: that of place()."""

    def place(self, request: Request) -> tuple[float, int]:
        """What a line is ordered by."""


class Fcfs:
    """First come, first served: a newcomer is behind everybody, and a preempted request before all who wait."""

    may_preempt = False

    def enter(self, request: Request, step: int) -> None:
        request.rank = (0, request.arrival)

    def put_back(self, request: Request) -> None:
        """The scheduler has put it before the others."""

    def head(self, waiting: Waiting) -> Request:
        return next(iter(waiting.values()))

    def outranks(self, head: Request, running: Request) -> bool:
        return False

    def start(self, request: Request) -> None:
        """It keeps its rank."""

    def leave(self, request: Request, was_running: bool) -> None:
        """Nothing is known of it here."""

    def arrange(self, running: list[Request]) -> None:
        """They are in order."""

    def first(self, unfinished: Iterable[Request]) -> Request | None:
        return min(unfinished, key=attrgetter("arrival"), default=None)

    def lines(self, waiting: Waiting) -> Sequence[Sequence[Request]]:
        return (list(waiting.values()),)

    def place(self, request: Request) -> tuple[float, int]:
        return (0, request.arrival)


class Priority:
    """A smaller number goes first, as if it had come ageing_steps steps earlier for each 1 that it is smaller.

    So a request is passed only by those that come within ageing_steps times the difference of the numbers, ranks never
    change, and the first in order is never preempted.
    """

    may_preempt = True

    def __init__(self, ageing_steps: int = AGEING_STEPS) -> None:
        self.ageing_steps = ageing_steps
        self.line: list[Request] = []

    def enter(self, request: Request, step: int) -> None:
        request.rank = (step + self.ageing_steps * request.priority, request.arrival)
        insort(self.line, request, key=RANK)

    def put_back(self, request: Request) -> None:
        insort(self.line, request, key=RANK)

    def head(self, waiting: Waiting) -> Request:
        return self.line[0]

    def outranks(self, head: Request, running: Request) -> bool:
        return head.rank < running.rank

    def start(self, request: Request) -> None:
        del self.line[bisect_left(self.line, request.rank, key=RANK)]

    def leave(self, request: Request, was_running: bool) -> None:
        if not was_running:
            self.start(request)

    def arrange(self, running: list[Request]) -> None:
        """They are in order."""

    def first(self, unfinished: Iterable[Request]) -> Request | None:
        return min(unfinished, key=RANK, default=None)

    def lines(self, waiting: Waiting) -> Sequence[Sequence[Request]]:
        return (list(self.line),)

    def place(self, request: Request) -> tuple[float, int]:
        return request.rank


def make_policy(
    name: str,
    tenant_weights: Mapping[str, float],
    *,
    ageing_steps: int = AGEING_STEPS,
    quantum: int = QUANTUM,
    most_turns: int = MOST_TURNS,
) -> Policy:
    """The policy of a name in config.POLICIES. tenant_weights are those of Fair that are not 1."""
    if name == "priority":
        return Priority(ageing_steps)
    return Fair(tenant_weights, quantum, most_turns) if name == "fair" else Fcfs()
