"""The pool and the queues over time, in a bounded number of spans however long a run gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from millpond.core.step import StepStats

MOST_SPANS = 256
FIRST_WIDTH = 2**-10  # seconds


class Span(NamedTuple):
    """Means over the time of one span (idle time counts as 0), and the preemptions in it."""

    start: float
    used_blocks: float
    num_running: float
    num_waiting: float
    num_preempted: int


@dataclass(slots=True)
class _Sums:
    """Block-seconds and request-seconds of one span."""

    used: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    preempted: int = 0

    def pass_time(self, seconds: float, stats: StepStats) -> None:
        self.used += seconds * (stats.num_blocks - stats.free_blocks)
        self.running += seconds * stats.num_running
        self.waiting += seconds * stats.num_waiting

    def add(self, other: _Sums) -> None:
        self.used += other.used
        self.running += other.running
        self.waiting += other.waiting
        self.preempted += other.preempted


@dataclass(slots=True)
class PoolTimeline:
    """Shown every step; spans double their width when the run outgrows MOST_SPANS of them."""

    width: float = FIRST_WIDTH
    seconds: float = 0.0
    most_used_blocks: int = 0
    most_running: int = 0
    most_waiting: int = 0
    _sums: list[_Sums] = field(default_factory=list)

    def add(self, stats: StepStats, end: float) -> None:
        """A step that ended `end` seconds after the start and computed for execute_seconds."""
        start = end - stats.execute_seconds
        self.seconds = end
        self._raise_peaks(stats)
        while end > self.width * MOST_SPANS:
            self._double()
        first, last = int(start / self.width), int(end / self.width)
        while len(self._sums) <= last:
            self._sums.append(_Sums())
        self._sums[last].preempted += stats.num_preempted
        if first == last:  # as nearly all are: many steps to a span
            self._sums[last].pass_time(end - start, stats)
            return
        for index in range(first, last + 1):
            inside = min(end, (index + 1) * self.width) - max(start, index * self.width)
            self._sums[index].pass_time(inside, stats)

    def _raise_peaks(self, stats: StepStats) -> None:
        used = stats.num_blocks - stats.free_blocks
        if used > self.most_used_blocks:
            self.most_used_blocks = used
        if stats.num_running > self.most_running:
            self.most_running = stats.num_running
        if stats.num_waiting > self.most_waiting:
            self.most_waiting = stats.num_waiting

    def _double(self) -> None:
        self.width *= 2.0
        for even, odd in zip(self._sums[::2], self._sums[1::2], strict=False):
            even.add(odd)
        self._sums = self._sums[::2]

    def spans(self) -> list[Span]:
        """From the start to the last step; the last span is cut where the run ends."""
        spans = []
        for index, sums in enumerate(self._sums):
            start = index * self.width
            length = min(self.width, self.seconds - start)
            if length > 0.0:
                means = sums.used / length, sums.running / length, sums.waiting / length
                spans.append(Span(start, *means, sums.preempted))
        return spans

    @property
    def mean_used_blocks(self) -> float:
        return sum(each.used for each in self._sums) / self.seconds if self.seconds else 0.0
