"""A disk that is part of a state which is explored: what it answers is an action, as what the runner says is."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from millpond.core.disk_prefixes import DiskCounters
from millpond.core.request import Request
from millpond.core.step import BlockData

LATER = 0  # of its answers; n + 1 is n blocks


class ChosenDisk:
    """A PrefixDisk: for each head that asks it has as many blocks as it is told, now or later.

    Who has nobody running beside it is waited for, so later is never for it. What it has is right, as a store's checks
    see to, and it has it whatever was offered: other servers may have written it.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.answers: Iterator[int] = iter(())
        self.counters = DiskCounters()  # nobody looks at them
        self.num_unwritten = 0

    def fetched(self, request: Request, num_found: int, *, wait: bool) -> tuple[BlockData, ...] | None:
        size, answer = self.block_size, next(self.answers, LATER + 1)
        most = (request.num_tokens - 1) // size
        if answer == LATER and num_found < most and not wait:
            return None
        end = min(num_found + max(answer - 1, 0), most)
        starts = range(num_found * size, end * size, size)
        return tuple(array("q", request.token_ids_between(start, start + size)).tobytes() for start in starts)

    def offer(self, request: Request, index: int, block_id: int) -> None:
        """What it has, it is told."""

    def withdraw(self, block_id: int) -> None:
        """It copies nothing."""

    def forget(self, request: Request) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """Nothing is to be written."""
