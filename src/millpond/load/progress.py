"""How a download tells its caller how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called every one to ten mebibytes, perhaps from another thread. `what` changes when a new part of the work
    begins; `total_bytes` is None where it is not known. An exception raised here ends the download."""

    def __call__(self, done_bytes: int, total_bytes: int | None, what: str) -> None: ...


def ignore(done_bytes: int, total_bytes: int | None, what: str) -> None:
    """The Progress of a caller that wants none."""
