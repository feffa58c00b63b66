"""The moments by which calls must have come on, soonest first. Nothing here reads a clock."""

from __future__ import annotations

import heapq
import itertools

from millpond.engine.call import Call
from millpond.errors import RequestTimeoutError

FEWEST_TO_SWEEP = 64


class Deadlines:
    """A heap of (moment, call, what the caller is told then). Those of calls that are over are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call, float, bool]] = []
        self._order = itertools.count()
        self._sweep_at = FEWEST_TO_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, now: float, call: Call, seconds: float, *, for_waiting: bool) -> None:
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(self._heap, (now + seconds, next(self._order), call, seconds, for_waiting))

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
            _, _, call, seconds, for_waiting = heapq.heappop(self._heap)
            found.append((call, _error(seconds, for_waiting)))
        return found


def _counts(entry: tuple[float, int, Call, float, bool]) -> bool:
    _, _, call, _, for_waiting = entry
    return not call.is_over and (call.is_waiting or not for_waiting)


def _error(seconds: float, for_waiting: bool) -> RequestTimeoutError:
    if for_waiting:
        message = f"the request waited for {seconds:g} s, its limit, and no step had room for it; try again later"
        return RequestTimeoutError(message, "queue_timeout")
    return RequestTimeoutError(f"the request took longer than its limit of {seconds:g} s", "request_timeout")
