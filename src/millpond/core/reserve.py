"""The reserve: how many blocks are held back from the newcomer at the head of waiting, so that others can grow.

Whatever a reserve says, the scheduler keeps the law: it may delay a request, it may never exclude one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil, log, sqrt
from operator import add, itemgetter
from typing import Protocol

from millpond.core.block_pool import resolve_watermark_blocks
from millpond.core.request import Request
from millpond.core.speculation import FIXED_ROWS

WINDOW = 64  # outputs that are remembered: few, so that traffic of another kind is soon what counts
PRIOR_OUTPUTS = 2  # outputs' worth of belief that who has come far goes on as far again
PRIOR_BLOCKS = 2  # where that belief begins, and twice that is the length that it expects
PARTS = 4  # of a block: what lengths are told apart by
WAITS = 2  # so many waits for the next end are an admission's worth
MOST_SHARE = 7, 8  # of the pool
RECHECK = 4  # schedules that a refusal holds for, while nothing ends
OFFSETS = (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16))  # in parts


class Reserve(Protocol):
    """What Scheduler asks before each admission, and tells of each output that ended by itself.

    blocks is the newest choice. choose() gets the head of waiting, the blocks it needs, how many of them are taken from
    the free ones, how many are free, and the running requests, each holding blocks for all of its tokens.
    """

    @property
    def blocks(self) -> int: ...

    def choose(self, head: Request, need: int, taken: int, num_free: int, running: Sequence[Request]) -> int: ...

    def note_end(self, num_output_tokens: int) -> None: ...


class FixedReserve:
    """The same number of blocks for everyone."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def choose(self, head: Request, need: int, taken: int, num_free: int, running: Sequence[Request]) -> int:
        return self.blocks

    def note_end(self, num_output_tokens: int) -> None:
        """Nothing: it does not learn."""


class AutoReserve:
    """What the running requests and the head are likely to need beyond what they hold, before enough of them end.

    How long outputs are is learned from the newest WINDOW that ended, and the running ones that have not: the chance to
    get from each length to each later one (Kaplan and Meier). From it follow, at some points of the time ahead, the
    mean and the spread of the blocks that will be held if nobody else comes. How much of the spread is covered is a
    matter of price, in rows as everywhere: a newcomer that is preempted has its tokens computed again, and one that
    waits leaves a step emptier, FIXED_ROWS over the rows for each until somebody ends. Where the first times its chance
    is no more than WAITS times the second, it comes in. max_tokens is not looked at: it is a bound, seldom a length.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.blocks = 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.most_blocks = num_blocks * MOST_SHARE[0] // MOST_SHARE[1]
        self._part = max(1, block_size // PARTS)
        self._prior = max(1, PRIOR_BLOCKS * block_size // self._part)
        self._outputs: deque[int] = deque()  # in parts
        self._ends: list[int] = []  # how many of them ended in each part
        self._pick = itemgetter(*OFFSETS)
        # Blocks at each point ahead, beyond the full ones of now, by the tokens in the last one.
        self._growth = [
            tuple([-(-(last + offset * self._part - 1) // block_size) for offset in OFFSETS])
            for last in range(block_size)
        ]
        self._refused: tuple[str, int, int] = ("", 0, 0)  # whom, for how many schedules more, and by how many blocks

    def note_end(self, num_output_tokens: int) -> None:
        part = num_output_tokens // self._part
        if part >= len(self._ends):
            self._ends += [0] * (part + 1 - len(self._ends))
        self._outputs.append(part)
        self._ends[part] += 1
        if len(self._outputs) > WINDOW:
            self._ends[self._outputs.popleft()] -= 1
        self._refused = "", 0, 0

    def choose(self, head: Request, need: int, taken: int, num_free: int, running: Sequence[Request]) -> int:
        """At most MOST_SHARE of the pool, and never more than an empty pool has beside the head."""
        most = min(self.most_blocks, self.num_blocks - need)
        name, left, blocks = self._refused
        if not running or self._has_room(num_free - taken, len(running) + 1):
            self.blocks = 0
        elif name == head.request_id and left > 0:
            self.blocks, self._refused = blocks, (name, left - 1, blocks)
        elif taken <= num_free:  # otherwise nothing depends on it
            beyond = ceil(self._peak(head, need, taken, num_free, running)) - (self.num_blocks - num_free) - taken
            self.blocks = min(max(beyond, 0), most)
            if taken > num_free - self.blocks:
                self._refused = head.request_id, RECHECK - 1, self.blocks
        return min(self.blocks, most)

    def _has_room(self, num_free: int, num_requests: int) -> bool:
        """Whether there is room for as much again as the longest output of any: roomy pools need no forecast."""
        if len(self._outputs) < WINDOW:
            return False
        longest = max(self._outputs) + 1
        return num_requests * (2 * longest * self._part // self.block_size + 2) <= num_free

    def _peak(self, head: Request, need: int, taken: int, num_free: int, running: Sequence[Request]) -> float:
        """The most blocks that will be held at any point ahead, as far as it pays to cover."""
        size, part = self.block_size, self._part
        survival = self._survival([request.num_output_tokens // part for request in (*running, head)])
        # Shared blocks are there once, whoever holds them; what each has yet to take is its own.
        shared = (self.num_blocks - num_free) / sum([len(request.block_ids) for request in running])
        mean = variance = [0.0] * len(OFFSETS)
        for request in (*running, head):
            tokens, start = request.num_tokens, request.num_output_tokens // part
            held = taken - need if request is head else (shared - 1.0) * len(request.block_ids)
            full, chance = tokens // size + held, 1.0 / survival[start]
            alive = [chance * each for each in self._pick(survival[start:])]
            blocks = [full + more for more in self._growth[tokens % size]]
            expected = [p * count for p, count in zip(alive, blocks, strict=True)]
            mean = list(map(add, mean, expected))
            variance = [v + e * (b - e) for v, e, b in zip(variance, expected, blocks, strict=True)]
        worth = self._worth_of_waiting(len(running))
        losses = [p * (head.num_tokens + offset * part) for p, offset in zip(alive, OFFSETS, strict=True)]
        points = zip(mean, variance, losses, strict=True)
        return max([m + sqrt(v) * _deviations(worth, loss) for m, v, loss in points])

    def _survival(self, parts: Sequence[int]) -> list[float]:
        """The chance of an output to be longer than so many parts, as far as OFFSETS from the longest running one."""
        length = max(parts) + OFFSETS[-1] + 1
        reached = [0] * max(length, len(self._ends))
        for part in parts[:-1]:  # the last is the head, which has run no further than what it is asked about
            reached[part] += 1
        for part, count in enumerate(self._ends):
            reached[part] += count
        total = 0
        for part in range(len(reached) - 1, -1, -1):
            reached[part] = total = total + reached[part]
        survival, left = [], 1.0
        ends = self._ends + [0] * (length - len(self._ends))
        for part in range(length):
            survival.append(left)
            prior = PRIOR_OUTPUTS / (part + 1 + self._prior)
            left *= 1.0 - (ends[part] + prior) / (reached[part] + PRIOR_OUTPUTS)
        return survival

    def _worth_of_waiting(self, num_running: int) -> float:
        """In rows: a step without the newcomer costs each of its tokens so much, and somebody ends in so many steps."""
        known = sum(self._outputs) + PRIOR_OUTPUTS * 2 * self._prior
        mean = known * self._part / (len(self._outputs) + PRIOR_OUTPUTS)
        return WAITS * (FIXED_ROWS / num_running) * (mean / num_running)


def make_reserve(
    num_blocks: int, block_size: int, watermark: float | str, watermark_blocks: int | None = None
) -> Reserve:
    """A pool's reserve: watermark_blocks where they are given, else a share of the pool, or for "auto" what it learns.

    Raises ConfigError for a reserve that the pool cannot hold.
    """
    if watermark_blocks is None and isinstance(watermark, str):
        return AutoReserve(num_blocks, block_size)
    share = 0.0 if isinstance(watermark, str) else watermark
    return FixedReserve(resolve_watermark_blocks(num_blocks, share, watermark_blocks))


def _deviations(worth: float, loss: float) -> float:
    """How many standard deviations to cover, so that the loss times its chance is at most what waiting is worth.

    The chance to lie z deviations above the mean is taken as exp(-z * z / 2) / 2, which a normal one never exceeds.
    """
    return sqrt(2.0 * log(0.5 * loss / worth)) if loss > 2.0 * worth else 0.0
