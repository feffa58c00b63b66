"""Disks for tests: one in memory whose readings come when a test says so, and real folders for scripted runners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers import ScriptedRunner
from millpond.core.disk_prefixes import DiskCounters, DiskPrefixes, StoredBlock
from millpond.load.block_file import BlockFormat
from millpond.load.prefix_store import PrefixStore

IDENTITY = bytes(range(32))


class HandReading:
    """It has come as far as the test let it. waits are the seconds that somebody was ready to wait."""

    def __init__(self, data: list[bytes], comes_at_once: bool) -> None:
        self._all = data
        self.data: list[bytes] = []
        self.is_done = self.is_cancelled = False
        self.waits: list[float] = []
        if comes_at_once:
            self.come()

    def come(self, num_blocks: int | None = None) -> None:
        """All of it, or its first blocks while the rest is on its way."""
        self.data = self._all[:num_blocks]
        self.is_done = num_blocks is None

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return self.is_done

    def cancel(self) -> None:
        self.is_cancelled = True


class MemoryDisk:
    """A BlockStore over a runner that has every block at once; at_once says whether readings come by themselves."""

    def __init__(self, runner: ScriptedRunner, at_once: bool = True) -> None:
        self.runner = runner
        self.at_once = at_once
        self.identity = IDENTITY
        self.counters = DiskCounters()
        self.blocks: dict[bytes, tuple[StoredBlock, bytes]] = {}
        self.readings: list[HandReading] = []
        self.withdrawn: list[int] = []
        self.used: list[tuple[bytes, int]] = []
        self.is_closed = False

    @property
    def num_unwritten(self) -> int:
        return 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def read(self, blocks):
        for block in blocks:
            assert self.blocks[block.key][0] == block
        reading = HandReading([self.blocks[block.key][1] for block in blocks], self.at_once)
        self.readings.append(reading)
        return reading

    def offer(self, block_id: int, block: StoredBlock) -> None:
        data = bytearray(self.runner.block_bytes)
        self.runner.read_block(block_id, memoryview(data))
        self.blocks[block.key] = block, bytes(data)

    def withdraw(self, block_id: int) -> None:
        self.withdrawn.append(block_id)

    def use(self, blocks) -> None:
        self.used += blocks

    def close(self) -> None:
        self.is_closed = True


def disk_in(
    folder: Path, *, identity: bytes = IDENTITY, most_bytes: int = 2**20, block_size: int = 4
) -> Callable[[ScriptedRunner], DiskPrefixes]:
    """For make_engine: the prefixes of a folder, with a clock that stands still."""

    def open_disk(runner: ScriptedRunner) -> DiskPrefixes:
        form = BlockFormat(identity, block_size, runner.block_bytes)
        store = PrefixStore(folder, form, most_bytes=most_bytes, read_block=runner.read_block)
        return DiskPrefixes(store, block_size, lambda: 0.0)

    return open_disk
