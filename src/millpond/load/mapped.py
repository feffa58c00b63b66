"""Files as read-only memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file as read-only memory. An empty file cannot be mapped, and is refused by the header check."""
    try:
        if not path.is_file():
            raise ModelFileError(f"{path.name}: not a file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror}") from error


def forget(data: NDArray[np.generic]) -> None:
    """Give back the memory that what was read of a mapped array takes; the file is read again where it is wanted again.

    Does nothing for an array that is not of a mapped file, and where the system cannot.
    """
    owner: object = data
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        start = data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
        first = start - start % mmap.PAGESIZE
        owner.madvise(mmap.MADV_DONTNEED, first, start + data.nbytes - first)
