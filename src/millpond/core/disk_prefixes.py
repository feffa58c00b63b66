"""Prefixes beyond the pool: which blocks of a request are on disk, and fetching them before it begins.

The blocks are read and checked by a store in threads of its own. A request is admitted once what it can use is in
memory; nothing that comes from disk can then go wrong in a step any more.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from millpond.core.request import Request
from millpond.core.step import BlockData, Clock

DIGEST_BYTES = 32
# A request waits no longer for its blocks: what has come by then is used, and the rest is computed.
MOST_FETCH_SECONDS = 1.0
NO_SALT, SALT = b"\0", b"\1"


class StoredBlock(NamedTuple):
    """A block as the disk knows it: its tokens behind its parent. key is a digest of both, and of everything before.

    depth is how many blocks are before it.
    """

    key: bytes
    parent: bytes
    depth: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class DiskCounters:
    """What has happened since the start. damaged_blocks are files that were not what they should be; failed_writes
    blocks that the disk did not take; stored_bytes is what the folder holds, of other models too."""

    read_bytes: int = 0
    written_bytes: int = 0
    damaged_blocks: int = 0
    failed_writes: int = 0
    evicted_blocks: int = 0
    stored_bytes: int = 0


class Reading(Protocol):
    """Blocks on their way from disk, the first ones first."""

    def wait(self, seconds: float) -> bool:
        """Whether it has come to its end, at the latest in so many seconds."""

    def cancel(self) -> None:
        """Nobody wants the rest."""

    @property
    def data(self) -> Sequence[BlockData]:
        """What has come so far."""


class BlockStore(Protocol):
    """Blocks of one model on disk. No method raises for what the disk does."""

    counters: DiskCounters

    @property
    def identity(self) -> bytes:
        """A digest of all that the bits of a block depend on, besides the tokens."""

    @property
    def num_unwritten(self) -> int:
        """Blocks that were offered and are not on disk yet."""

    def __contains__(self, key: bytes) -> bool: ...

    def read(self, blocks: Sequence[StoredBlock]) -> Reading: ...

    def offer(self, block_id: int, block: StoredBlock) -> None:
        """Keep a block of the pool, if it is still there when its turn comes."""

    def withdraw(self, block_id: int) -> None:
        """The block is about to be written."""

    def use(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """These (key, depth) have been of use: others go first."""

    def close(self) -> None: ...


class PrefixDisk(Protocol):
    """What a scheduler asks about the disk, and what the engine around it tells of it and ends it by."""

    @property
    def counters(self) -> DiskCounters: ...

    @property
    def num_unwritten(self) -> int:
        """Blocks that are to be kept and are not on disk yet."""

    def fetched(self, request: Request, num_found: int, *, wait: bool) -> tuple[BlockData, ...] | None:
        """The K/V of the blocks behind those that were found in the pool, as far as it is on disk and whole.

        None while it is on its way, which it is for a bounded time; with wait, it has come.
        """

    def offer(self, request: Request, index: int, block_id: int) -> None:
        """The block at an index of a request has become findable."""

    def withdraw(self, block_id: int) -> None:
        """The block is handed out to be written."""

    def forget(self, request: Request) -> None:
        """The request has ended."""

    def close(self) -> None:
        """Write what is still to be written, for some seconds at most; nothing is read or written afterwards."""


class _Fetch(NamedTuple):
    """The reading of a request's blocks from index `first` on, begun at some time of the clock."""

    request: Request
    first: int
    reading: Reading
    began: float


class DiskPrefixes:
    """A PrefixDisk over a store. Owned by the thread that steps."""

    def __init__(self, store: BlockStore, block_size: int, clock: Clock) -> None:
        self.store = store
        self.block_size = block_size
        self._clock = clock
        self._fetch: _Fetch | None = None
        self._began: dict[str, float] = {}  # of who waits, as another head may be read for in between
        self._given_up: Reading | None = None

    @property
    def counters(self) -> DiskCounters:
        return self.store.counters

    @property
    def num_unwritten(self) -> int:
        return self.store.num_unwritten

    def fetched(self, request: Request, num_found: int, *, wait: bool) -> tuple[BlockData, ...] | None:
        """As PrefixDisk says; it is on its way for MOST_FETCH_SECONDS at most."""
        if not request.reads_prefix_cache:
            return ()
        fetch = self._fetch
        if fetch is None or fetch.request is not request or num_found < fetch.first:
            fetch = self._begin(request, num_found)
        data: tuple[BlockData, ...] = ()
        if fetch is not None:
            left = fetch.began + MOST_FETCH_SECONDS - self._clock()
            is_done = fetch.reading.wait(max(0.0, left) if wait else 0.0)
            if not (is_done or wait or left <= 0):
                return None
            data = tuple(fetch.reading.data)[num_found - fetch.first :]
            if not is_done:
                self._given_up = fetch.reading
            self._drop()
            self._began.pop(request.request_id, None)
        self._use(request, num_found + len(data))
        return data

    def offer(self, request: Request, index: int, block_id: int) -> None:
        block = self._block(request, index)
        if block.key not in self.store:
            self.store.offer(block_id, block)

    def withdraw(self, block_id: int) -> None:
        self.store.withdraw(block_id)

    def forget(self, request: Request) -> None:
        self._began.pop(request.request_id, None)
        if self._fetch is not None and self._fetch.request is request:
            self._drop()

    def close(self) -> None:
        self._drop()
        self.store.close()

    def _begin(self, request: Request, num_found: int) -> _Fetch | None:
        """Whoever has nothing on disk leaves the reading of another alone; whoever asks again goes on as it began."""
        if self._given_up is not None:
            if not self._given_up.wait(0.0):  # the disk hangs, and whoever asked it now would wait behind that
                return None
            self._given_up = None
        blocks = []
        for index in range(num_found, (request.num_tokens - 1) // self.block_size):
            block = self._block(request, index)
            if block.key not in self.store:
                break
            blocks.append(block)
        if not blocks:
            return None
        self._drop()
        began = self._began.setdefault(request.request_id, self._clock())
        self._fetch = _Fetch(request, num_found, self.store.read(blocks), began)
        return self._fetch

    def _drop(self) -> None:
        if self._fetch is not None:
            self._fetch.reading.cancel()
            self._fetch = None

    def _use(self, request: Request, num_blocks: int) -> None:
        if num_blocks:
            self._block(request, num_blocks - 1)
            self.store.use([(key, depth) for depth, key in enumerate(request.disk_keys[1 : num_blocks + 1])])

    def _block(self, request: Request, index: int) -> StoredBlock:
        """Each full block of a request is digested once, however often it is asked for."""
        keys, size = request.disk_keys, self.block_size
        if not keys:
            keys.append(first_key(self.store.identity, request.sampling.cache_salt))
        while len(keys) <= index + 1:
            start = (len(keys) - 1) * size
            keys.append(next_key(keys[-1], request.token_ids_between(start, start + size)))
        token_ids = request.token_ids_between(index * size, (index + 1) * size)
        return StoredBlock(keys[index + 1], keys[index], index, token_ids)


def first_key(identity: bytes, salt: str | None) -> bytes:
    """The parent of first blocks. The salt itself is never on disk, and no salt is another one's "" or None."""
    tagged = NO_SALT if salt is None else SALT + salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(tagged, digest_size=DIGEST_BYTES, key=identity).digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(tokens, digest_size=DIGEST_BYTES, key=parent).digest()
