"""The files of a prefix store: their names, how much they take, and which of them go first when there is no room.

    folder/<identity of a model>/<key of a block>.kv

A file's time of modification says when it was of use last, less a second for each block before it in its sequence: the
least recently used goes first, the deepest first among those used together, and a restart knows it too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from millpond.core.disk_prefixes import DiskCounters
from millpond.core.step import Clock
from millpond.errors import ConfigError

logger = logging.getLogger(__name__)

IDENTITY_NAME = re.compile(r"[0-9a-f]{16}")
BLOCK_NAME = re.compile(r"([0-9a-f]{64})\.kv")
PART = ".part"
STALE_SECONDS = 3600.0
# Once so much of the limit has been written, the folder is looked at again, for others may write to it as well.
LOOK_AGAIN = 1 / 16
# Of the limit, how much is made free at once.
SLACK = 1 / 32
USED_LATELY_SECONDS = 60.0


class _Found(NamedTuple):
    """A file of the folder. key is that of a block of this model, None for any other."""

    modified: float
    num_bytes: int
    path: Path
    key: bytes | None


class PrefixFolder:
    """Not more than most_bytes of files, of all models together. now is the wall clock, as the files' times are.

    Looked up in the engine's thread, changed in the store's. Raises ConfigError where it cannot be written to.
    """

    def __init__(
        self, path: Path, identity: bytes, most_bytes: int, counters: DiskCounters, now: Clock = time.time
    ) -> None:
        self.path = path
        self.most_bytes = most_bytes
        self.counters = counters
        self._own = path / identity.hex()[:16]
        self._now = now
        self._writer = secrets.token_hex(8)  # servers in containers may have the same process id
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._keys: set[bytes] = set()
        self._used_at: dict[bytes, float] = {}
        self._written_since = 0
        check_writable(path)
        self._own.mkdir(mode=0o700, exist_ok=True)
        self._make_room(0)
        _say_what_is_not_ours(path)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def path_of(self, key: bytes) -> Path:
        return self._own / f"{key.hex()}.kv"

    def discard(self, key: bytes) -> None:
        """The file is gone."""
        with self._lock:
            self._keys.discard(key)

    def remove(self, key: bytes) -> None:
        """Delete a file, and do not look for it again even where that fails."""
        self.discard(key)
        with contextlib.suppress(OSError):
            os.unlink(self.path_of(key))

    def use(self, key: bytes, depth: int) -> None:
        """A block was of use just now."""
        now = self._now()
        if key not in self._keys or now - self._used_at.get(key, 0.0) < USED_LATELY_SECONDS:
            return
        self._used_at[key] = now
        with contextlib.suppress(OSError):  # a file that is gone is missed when it is read
            os.utime(self.path_of(key), (now - depth, now - depth))

    def write(self, key: bytes, depth: int, contents: bytes | bytearray) -> None:
        """Add a file, in place of others where there is no room. Raises OSError, and leaves nothing."""
        num_bytes = len(contents)
        if (
            self.counters.stored_bytes + num_bytes > self.most_bytes
            or self._written_since > LOOK_AGAIN * self.most_bytes
        ):
            self._make_room(num_bytes)
        path = self.path_of(key)
        part = path.with_name(f"{self._writer}-{next(self._numbers)}-{path.stem[:16]}{PART}")
        try:
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb", buffering=0) as target:
                written, view = 0, memoryview(contents)
                while written < num_bytes:
                    written += target.write(view[written:])
            now = self._now()
            os.utime(part, (now - depth, now - depth))
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        self.counters.stored_bytes += num_bytes
        self._written_since += num_bytes
        self._used_at[key] = now
        with self._lock:
            self._keys.add(key)

    def _make_room(self, num_bytes: int) -> None:
        """Look at what is there, other servers' files too, and delete what has not been of use for longest."""
        found = sorted(self._look())
        total = sum(each.num_bytes for each in found)
        kept = found
        if total + num_bytes > self.most_bytes:
            room = (1 - SLACK) * self.most_bytes - num_bytes
            for number, each in enumerate(found, 1):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each.path)
                total -= each.num_bytes
                self.counters.evicted_blocks += 1
                kept = found[number:]
                if total <= room:
                    break
        keys = {each.key for each in kept if each.key is not None}
        with self._lock:
            self._keys = keys
        self._used_at = {key: at for key, at in self._used_at.items() if key in keys}
        self.counters.stored_bytes, self._written_since = total, 0

    def _look(self) -> Iterator[_Found]:
        """Every file of every model. What an interrupted write has left is deleted on the way."""
        for folder in _entries(self.path):
            if not (IDENTITY_NAME.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            is_own = folder.name == self._own.name
            for entry in _entries(Path(folder.path)):
                match = BLOCK_NAME.fullmatch(entry.name)
                if match is None and not entry.name.endswith(PART):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if match is not None and entry.is_file(follow_symlinks=False):
                    key = bytes.fromhex(match[1]) if is_own else None
                    yield _Found(status.st_mtime, status.st_size, Path(entry.path), key)
                elif match is None and self._now() - status.st_mtime > STALE_SECONDS:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)


def check_writable(path: Path) -> None:
    """Make the folder where it is not there. Raises ConfigError where it cannot be had or written to."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"prefixes cannot be kept in {path}: {error.strerror}; name a folder that can be written to with prefix_dir"
        ) from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _say_what_is_not_ours(path: Path) -> None:
    names = [entry.name for entry in _entries(path) if not IDENTITY_NAME.fullmatch(entry.name)]
    for folder in _entries(path):
        if IDENTITY_NAME.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
            names += [
                f"{folder.name}/{entry.name}"
                for entry in _entries(Path(folder.path))
                if not (BLOCK_NAME.fullmatch(entry.name) or entry.name.endswith(PART))
            ]
    if names:
        logger.warning(
            "%s holds %d files that are not blocks of K/V and are left alone: %s", path, len(names), names[0]
        )
