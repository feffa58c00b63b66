"""The files of a tokenizer, read whole, within a bound."""

from __future__ import annotations

from pathlib import Path

from millpond.errors import ModelFileError


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Raises ModelFileError for what cannot be read, and for what is too long before it is read."""
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise ModelFileError(f"{path.name} has {size} bytes, and may have {most_bytes}")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path.name} cannot be read: {error.strerror}") from error
