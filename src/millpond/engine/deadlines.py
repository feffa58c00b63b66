"""The moments by which calls must have come on, soonest first. Nothing here reads a clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from enum import StrEnum

from millpond.engine.call import Call
from millpond.errors import RequestTimeoutError

FEWEST_TO_SWEEP = 64


class Limit(StrEnum):
    """What a moment bounds: the wait for the first step, the whole answer, or the time in which it is of use."""

    QUEUE = "queue_timeout"
    REQUEST = "request_timeout"
    DEADLINE = "deadline"


class Deadlines:
    """A heap of (moment, call, what the caller is told then). Those of calls that are over are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call, float, Limit]] = []
        self._order = itertools.count()
        self._sweep_at = FEWEST_TO_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, now: float, call: Call, seconds: float, limit: Limit) -> None:
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(self._heap, (now + seconds, next(self._order), call, seconds, limit))

    def _sweep(self) -> None:
        """Most calls are over long before their moment, and would be kept until then."""
        self._heap = [entry for entry in self._heap if _counts(entry)]
        heapq.heapify(self._heap)
        self._sweep_at = max(FEWEST_TO_SWEEP, 2 * len(self._heap))

    @property
    def next(self) -> float | None:
        """The moment of the first that still counts; None where there is none."""
        while self._heap and not _counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[tuple[Call, RequestTimeoutError]]:
        """Take out those whose moment has come."""
        found = []
        while (moment := self.next) is not None and moment <= now:
            _, _, call, seconds, limit = heapq.heappop(self._heap)
            found.append((call, _error(seconds, limit, call.is_waiting)))
        return found


def _counts(entry: tuple[float, int, Call, float, Limit]) -> bool:
    _, _, call, _, limit = entry
    return not call.is_over and not call.is_overdue and (call.is_waiting or limit is not Limit.QUEUE)


def _error(seconds: float, limit: Limit, is_waiting: bool) -> RequestTimeoutError:
    if limit is Limit.QUEUE:
        message = f"the request waited for {seconds:g} s, its limit, and no step had room for it; try again later"
        return RequestTimeoutError(message, limit.value)
    if limit is Limit.DEADLINE:
        return missed_deadline(round(1000 * seconds), is_waiting)
    return overdue(seconds)


def overdue(seconds: float) -> RequestTimeoutError:
    """What the caller of a request is told that took longer than it may."""
    return RequestTimeoutError(f"the request took longer than its limit of {seconds:g} s", Limit.REQUEST.value)


def missed_deadline(deadline_ms: int, is_waiting: bool) -> RequestTimeoutError:
    """What the caller of a request is told whose deadline has passed."""
    where = "before any step had room for it" if is_waiting else "before the answer was complete"
    code = "deadline_waiting" if is_waiting else "deadline_running"
    return RequestTimeoutError(f"deadline_ms {deadline_ms} has passed {where}", code)


class Expiries:
    """The moments from which requests that have not begun are of no use. The engine's thread has it, and no clock."""

    def __init__(self) -> None:
        self._moments: dict[str, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._moments)

    def add(self, request_id: str, moment: float, deadline_ms: int) -> None:
        self._moments[request_id] = moment, deadline_ms

    def forget(self, request_ids: Iterable[str]) -> None:
        """These have begun, or ended."""
        for request_id in request_ids if self._moments else ():
            self._moments.pop(request_id, None)

    def due(self, now: float) -> dict[str, int]:
        """Take out those whose moment has come: deadline_ms by id."""
        found = {name: deadline_ms for name, (moment, deadline_ms) in self._moments.items() if moment <= now}
        self.forget(found)
        return found
