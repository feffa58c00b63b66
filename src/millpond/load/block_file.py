"""One block of K/V in a file: what it was made by and of, the bytes, and a checksum over all of it.

    magic, version, bytes of K/V, number of tokens | identity | key | parent | token ids | K/V | CRC-32

Nothing in a file is believed: it must say exactly what was expected of it before its bytes are used.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from pathlib import Path

from millpond.core.disk_prefixes import DIGEST_BYTES, StoredBlock

MAGIC = b"millblok"
VERSION = 1
HEAD = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}s")
CHECKSUM = struct.Struct("<I")


class BlockFileError(Exception):
    """Why a file is not what it should be; the text goes behind the file's name."""


class BlockFormat:
    """The files of one model: identity is a digest of all that their bits depend on, sizes are those of a block."""

    def __init__(self, identity: bytes, block_size: int, block_bytes: int) -> None:
        self.identity = identity
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._data_start = HEAD.size + 4 * block_size
        self.num_bytes = self._data_start + block_bytes + CHECKSUM.size

    def new_buffer(self) -> tuple[bytearray, memoryview]:
        """Room for a file, and the part of it that the K/V goes into."""
        buffer = bytearray(self.num_bytes)
        return buffer, memoryview(buffer)[self._data_start : self._data_start + self.block_bytes]

    def seal(self, buffer: bytearray, block: StoredBlock) -> None:
        """Put head and checksum around the K/V in a buffer."""
        buffer[: self._data_start] = self._head(block)
        end = self.num_bytes - CHECKSUM.size
        CHECKSUM.pack_into(buffer, end, zlib.crc32(memoryview(buffer)[:end]))

    def read(self, path: Path, block: StoredBlock) -> memoryview:
        """The K/V of a block. Raises BlockFileError for a file that is not exactly this block, OSError for none."""
        # Whatever stands there is opened: a pipe must not block, and a link is not followed.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise BlockFileError("it is not a file")
            if status.st_size != self.num_bytes:
                raise BlockFileError(f"it has {status.st_size} bytes, not {self.num_bytes}")
            buffer = bytearray(self.num_bytes)
            with os.fdopen(handle, "rb", buffering=0, closefd=False) as source:
                num_read = _read_whole(source, buffer)
        finally:
            os.close(handle)
        if num_read != self.num_bytes:
            raise BlockFileError(f"{num_read} of its {self.num_bytes} bytes could be read")
        self._check(memoryview(buffer), block)
        return memoryview(buffer)[self._data_start : self._data_start + self.block_bytes]

    def _head(self, block: StoredBlock) -> bytes:
        sizes = MAGIC, VERSION, self.block_size, self.block_bytes
        head = HEAD.pack(*sizes, self.identity, block.key, block.parent)
        return head + struct.pack(f"<{self.block_size}I", *block.token_ids)

    def _check(self, buffer: memoryview, block: StoredBlock) -> None:
        magic, version, *sizes, identity, key, parent = HEAD.unpack_from(buffer)
        if magic != MAGIC:
            raise BlockFileError("its first bytes are not those of a block of K/V")
        if version != VERSION or sizes != [self.block_size, self.block_bytes]:
            raise BlockFileError(f"it is of version {version} and of sizes {sizes}")
        end = self.num_bytes - CHECKSUM.size
        if CHECKSUM.unpack_from(buffer, end)[0] != zlib.crc32(buffer[:end]):
            raise BlockFileError("it is damaged: its checksum is wrong")
        if identity != self.identity:
            raise BlockFileError("it is another model's, or was computed in another way")
        if key != block.key or parent != block.parent or buffer[: self._data_start] != self._head(block):
            raise BlockFileError("it holds other tokens than its name says")


def _read_whole(source: object, buffer: bytearray) -> int:
    """Fill the buffer as far as the file goes; a read may give less than was asked for."""
    view, num_read = memoryview(buffer), 0
    while num_read < len(buffer):
        count = source.readinto(view[num_read:])  # type: ignore[attr-defined]
        if not count:
            break
        num_read += count
    return num_read
