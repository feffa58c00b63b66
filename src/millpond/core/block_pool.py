"""The pool of K/V blocks: who holds which, and the arithmetic of its size."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from millpond.core.prefix_cache import PrefixCache
from millpond.errors import ConfigError, InvariantError

RUN = 8  # blocks in a row


def blocks_for_length(num_tokens: int, block_size: int) -> int:
    """How many blocks hold num_tokens positions: the ceiling of num_tokens / block_size."""
    return -(-num_tokens // block_size)


def resolve_watermark_blocks(num_blocks: int, watermark: float, watermark_blocks: int | None = None) -> int:
    """The reserve in blocks: watermark_blocks where it is given, else the share int(watermark * num_blocks).

    Raises ConfigError unless 0 <= reserve < num_blocks. The share is 0 for every pool too small for it to make
    one whole block (under 100 blocks at the default of 0.01).
    """
    if watermark_blocks is None:
        if not 0.0 <= watermark < 1.0:
            raise ConfigError(f"watermark must be at least 0 and below 1, got {watermark:g}")
        return int(watermark * num_blocks)
    if not 0 <= watermark_blocks < num_blocks:
        raise ConfigError(
            f"watermark_blocks must be at least 0 and below the {num_blocks} blocks of the pool, got {watermark_blocks}"
        )
    return watermark_blocks


class BlockPool:
    """num_blocks blocks, each free or held by one holder or more.

    Who holds a block gets the one after it where that is free, since memory in a row is read fastest; else the first of
    RUN blocks in a row that are all free, so that more of them can follow. Otherwise the block that became free last is
    handed out first: its memory is in use already and near. One that was never used costs the system a page, and comes
    later. Last are those that the cache, where there is one, can find: the least recently used first, and of those that
    became free together the deepest. Every run makes the same choices.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.cache = cache
        self._ref_counts = [0] * num_blocks
        # Ordered sets rather than stacks: a block that is wanted again can be taken from the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(range(num_blocks)))
        self._free_in_run = [min(RUN, num_blocks - first) for first in range(0, num_blocks, RUN)]
        self._free_runs: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(range(num_blocks // RUN)))
        self._findable: OrderedDict[int, None] = OrderedDict()  # free as well; the next to be evicted first

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._findable)

    @property
    def free_block_ids(self) -> tuple[int, ...]:
        """The free blocks, the next to be handed out first but for those that come in a row."""
        return (*reversed(self._free), *self._findable)

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has; 0 means that it is free. Raises InvariantError for a block that is not here."""
        if not 0 <= block_id < self.num_blocks:
            raise InvariantError(f"block {block_id} is not in a pool of {self.num_blocks} blocks")
        return self._ref_counts[block_id]

    def num_held(self, block_ids: Sequence[int]) -> int:
        """How many of the blocks have a holder."""
        return sum([self._ref_counts[block_id] > 0 for block_id in block_ids])

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int] | None:
        """Take num_blocks free blocks with one holder each; None, and nothing taken, when fewer are free.

        after: the block that they are to follow, if they can.
        """
        if num_blocks > self.num_free:
            return None
        block_ids: list[int] = []
        for _ in range(min(num_blocks, len(self._free))):
            after = self._next_free(after)
            self._take(after)
            block_ids.append(after)
        # They became free from the back of their request to its front.
        block_ids += sorted([self._evict() for _ in range(num_blocks - len(block_ids))])
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def _next_free(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free:
            return after + 1
        if self._free_runs:
            return next(reversed(self._free_runs)) * RUN
        return next(reversed(self._free))

    def _take(self, block_id: int) -> None:
        del self._free[block_id]
        self._free_in_run[block_id // RUN] -= 1
        self._free_runs.pop(block_id // RUN, None)

    def _put(self, block_id: int) -> None:
        self._free[block_id] = None
        self._free_in_run[block_id // RUN] += 1
        if self._free_in_run[block_id // RUN] == RUN:
            self._free_runs[block_id // RUN] = None

    def _evict(self) -> int:
        block_id, _ = self._findable.popitem(last=False)
        if self.cache is not None:
            self.cache.forget(block_id)
        return block_id

    def share(self, block_ids: Sequence[int]) -> None:
        """Give each block one holder more. Raises InvariantError for a block that is neither held nor findable."""
        for block_id in block_ids:
            if self.ref_count(block_id) == 0:
                if block_id not in self._findable:
                    raise InvariantError(f"block {block_id} is free and cannot be found: it has nothing to share")
                del self._findable[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one holder off each block; a block with none left becomes free.

        Raises InvariantError, and changes nothing, when a block has fewer holders than it is to lose.
        """
        for block_id, times in Counter(block_ids).items():
            held = self.ref_count(block_id)
            if times > held:
                raise InvariantError(f"block {block_id}: {times} holders released, but it has {held}")
        # From the back, so that who takes them next finds them in the order in which they lay in memory, and so that
        # what can be found becomes free the deepest first.
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self.cache is not None and block_id in self.cache:
                    self._findable[block_id] = None
                else:
                    self._put(block_id)
