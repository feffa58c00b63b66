"""A folder of K/V blocks, one file each: what `--cache-dir` keeps of prefixes. Reads and writes in two threads.

Files are named by a digest of what they hold, get their names when they are whole, and are checked when they are read:
several servers may share a folder, and a crash leaves nothing that would be believed. So nothing is synced to the disk.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from millpond.core.disk_prefixes import DiskCounters, StoredBlock
from millpond.core.step import Clock
from millpond.errors import ConfigError
from millpond.load.block_file import BlockFileError, BlockFormat
from millpond.load.prefix_folder import PrefixFolder

logger = logging.getLogger(__name__)

# Of the time between two writes, the share that a write may take: the cores are the model's.
WRITE_SHARE = 0.05
CLOSE_SECONDS = 5.0
# Both threads together: less than a server waits for its engine, so that it hears what came of this.
JOIN_SECONDS = 8.0
# How long nothing is written after a disk has refused to take it.
REFUSED_SECONDS = 10.0


class BlockReading:
    """The blocks that one request waits for, read in order until one of them cannot be had."""

    def __init__(self, blocks: Sequence[StoredBlock]) -> None:
        self.blocks = blocks
        self.is_cancelled = False
        self._data: list[memoryview] = []
        self._ended = threading.Event()

    @property
    def data(self) -> Sequence[memoryview]:
        return tuple(self._data)

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def cancel(self) -> None:
        self.is_cancelled = True

    def run(self, read: Callable[[StoredBlock], memoryview | None]) -> None:
        for block in self.blocks:
            data = None if self.is_cancelled else read(block)
            if data is None:
                break
            self._data.append(data)
        self._ended.set()


class PrefixStore:
    """The blocks of one model in a folder that holds most_bytes at most, of all models together.

    read_block(block_id, into) copies a block of the pool; it is called in a thread of the store's own.
    Raises ConfigError for a folder that cannot be made or written to, or is too small for a single block.
    """

    def __init__(
        self,
        folder: Path,
        form: BlockFormat,
        *,
        most_bytes: int,
        read_block: Callable[[int, memoryview], None],
        clock: Clock = time.monotonic,
    ) -> None:
        if most_bytes < form.num_bytes:
            raise ConfigError(
                f"the folder of prefixes may hold {most_bytes} bytes, but one block takes {form.num_bytes}: raise "
                "prefix_dir_size"
            )
        self.counters = DiskCounters()
        self._form = form
        self._folder = PrefixFolder(folder, form.identity, most_bytes, self.counters)
        self._read_block = read_block
        self._clock = clock
        self._buffer, self._room = form.new_buffer()
        self._lock = threading.Lock()
        self._offers: dict[int, StoredBlock] = {}
        self._num_in_write = 0
        self._used: list[tuple[bytes, int]] = []
        self._wake = threading.Semaphore(0)
        self._stopping = threading.Event()
        self._stop_at = 0.0
        self._refused_until = 0.0
        self._refusal: str | None = None
        self._readings: queue.SimpleQueue[BlockReading | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_on, name="millpond-disk-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_on, name="millpond-disk-writer", daemon=True)
        self._reader.start()
        self._writer.start()
        atexit.register(self.close)

    @property
    def identity(self) -> bytes:
        return self._form.identity

    def __contains__(self, key: bytes) -> bool:
        return key in self._folder

    def __len__(self) -> int:
        return len(self._folder)

    @property
    def num_unwritten(self) -> int:
        return len(self._offers) + self._num_in_write

    def read(self, blocks: Sequence[StoredBlock]) -> BlockReading:
        reading = BlockReading(blocks)
        self._readings.put(reading)
        return reading

    def offer(self, block_id: int, block: StoredBlock) -> None:
        if self._stopping.is_set():
            return
        with self._lock:
            self._offers[block_id] = block
        self._wake.release()

    def withdraw(self, block_id: int) -> None:
        with self._lock:
            self._offers.pop(block_id, None)

    def use(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        with self._lock:
            self._used += blocks
        self._wake.release()

    def close(self) -> None:
        """Write what was offered, for CLOSE_SECONDS at most, then end both threads. What is not written is said."""
        if self._stopping.is_set():
            return
        atexit.unregister(self.close)
        self._stop_at = self._clock() + CLOSE_SECONDS
        self._stopping.set()
        self._wake.release()
        self._readings.put(None)
        left = JOIN_SECONDS
        for thread in (self._writer, self._reader):
            began = time.monotonic()
            thread.join(max(0.0, left))
            left -= time.monotonic() - began
            if thread.is_alive():
                logger.warning("%s hangs in %s and is left behind", thread.name, self._folder.path)
        if num := self.num_unwritten:
            logger.warning("%d blocks of K/V were not written any more to %s", num, self._folder.path)

    # Below: the threads.

    def _read_on(self) -> None:
        while (reading := self._readings.get()) is not None:
            reading.run(self._read)

    def _read(self, block: StoredBlock) -> memoryview | None:
        """The K/V of a block; None, and the file is not looked for again, where it is gone or not to be believed."""
        path = self._folder.path_of(block.key)
        try:
            data = self._form.read(path, block)
        except FileNotFoundError:  # another server of this folder has evicted it
            self._folder.discard(block.key)
            return None
        except (BlockFileError, OSError) as reason:
            why = reason.strerror if isinstance(reason, OSError) else str(reason)
            logger.warning("%s is not used and is deleted: %s", path, why)
            self.counters.damaged_blocks += 1
            self._folder.remove(block.key)
            return None
        self.counters.read_bytes += self._form.num_bytes
        return data

    def _write_on(self) -> None:
        while True:
            self._wake.acquire()
            began = self._clock()
            if self._stopping.is_set() and (not self._offers or began > self._stop_at):
                return
            self._note_use()
            self._write_next()
            if self._offers and self._stopping.is_set():
                self._wake.release()
            self._stopping.wait((self._clock() - began) * (1 / WRITE_SHARE - 1))

    def _note_use(self) -> None:
        with self._lock:
            used, self._used = self._used, []
        for key, depth in used:
            self._folder.use(key, depth)

    def _write_next(self) -> None:
        """Write the block that was offered first, unless it is gone by the time it is copied."""
        with self._lock:
            block_id, block = next(iter(self._offers.items()), (-1, None))
        if block is None:
            return
        is_refused = self._clock() < self._refused_until
        if not (block.key in self._folder or is_refused):
            self._read_block(block_id, self._room)
        with self._lock:
            if self._offers.get(block_id) is not block:
                return  # what was copied may be somebody else's already
            del self._offers[block_id]
            self._num_in_write = 1
        self._write(block, is_refused)
        self._num_in_write = 0

    def _write(self, block: StoredBlock, is_refused: bool) -> None:
        if block.key in self._folder:
            return
        if is_refused:
            self.counters.failed_writes += 1
            return
        self._form.seal(self._buffer, block)
        try:
            self._folder.write(block.key, block.depth, self._buffer)
        except IsADirectoryError:  # which says nothing of other blocks
            self.counters.failed_writes += 1
            logger.warning("%s is a folder, where a block of K/V is to be", self._folder.path_of(block.key))
            return
        except OSError as error:
            self._refuse(error)
            return
        self._refusal = None
        self.counters.written_bytes += len(self._buffer)

    def _refuse(self, error: OSError) -> None:
        """Go on without the disk for a while; each trouble is said once."""
        self.counters.failed_writes += 1
        self._refused_until = self._clock() + REFUSED_SECONDS
        if self._refusal != error.strerror:
            self._refusal = error.strerror
            logger.warning("prefixes are not written to %s for now: %s", self._folder.path, error.strerror)
