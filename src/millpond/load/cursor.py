"""A bounds-checked reader over a mapped file: nothing is read, or made room for, before its length was checked."""

from __future__ import annotations

import mmap
import struct

from millpond.errors import ModelFileError

MAX_HEADER_BYTES = 2**28  # metadata and tensor table; the largest in use are below 2**26

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a little-endian file. Every read names what it reads, for the message when the file ends first."""

    def __init__(self, file_name: str, buffer: mmap.mmap | bytes) -> None:
        self.file_name = file_name
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.file_name}: {message}")

    def take(self, num_bytes: int, what: str) -> int:
        """Move past `num_bytes` and return where they begin."""
        begin, end = self.position, self.position + num_bytes
        if end > self.size:
            raise self.error(f"incomplete file: {what} needs bytes {begin}..{end}, the file has {self.size}")
        if end > MAX_HEADER_BYTES:
            raise self.error(f"{what} ends at byte {end}, and a header may have {MAX_HEADER_BYTES} bytes")
        self.position = end
        return begin

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.take(8, what))[0]
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in a row, each a u64 length and that many bytes of UTF-8.

        One plain loop with local names: a tokenizer has 100,000 strings and they are most of a file's opening time.
        """
        buffer, limit, position = self.buffer, min(self.size, MAX_HEADER_BYTES), self.position
        unpack = _U64.unpack_from
        texts: list[str] = []
        for index in range(count):
            begin = position + 8
            end = begin + unpack(buffer, position)[0] if begin <= limit else begin
            if end > limit:
                self.position = position
                self.take(end - position, what if count == 1 else f"{what}, string {index} of {count},")
            try:
                texts.append(buffer[begin:end].decode())
            except UnicodeDecodeError:
                raise self.error(f"{what} is not UTF-8 (string {index} of {count}, bytes {begin}..{end})") from None
            position = end
        self.position = position
        return texts
