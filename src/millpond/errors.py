"""What can go wrong, in two families: the caller's mistakes and the engine's own faults.

serve/ maps each class to a status code; the text of an error is shown to the user, so it names the
value, the limit and the remedy, and never a local path that the caller did not send.
"""

from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shown(value: object) -> str:
    """A caller's value for a message: its beginning, at the cost of its beginning, however long and deep it is."""
    return f"{_SHORT.repr(value):.100}"


class MillpondError(Exception):
    """Any error that millpond raises on purpose."""


class InvalidRequestError(MillpondError):
    """The caller sent something that cannot be served (400). `param` names the field, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(MillpondError):
    """A setting or a combination of settings that cannot work; refused at start."""


class ModelFileError(MillpondError):
    """A model file that is truncated, corrupt or of a kind that is not supported."""


class ModelNotFoundError(MillpondError):
    """No such model: neither a known name, nor a file, nor a folder, nor a repository."""


class RequestNotFoundError(MillpondError):
    """No such request: none of that id is unfinished, or among the last that have ended (404)."""


class DownloadError(MillpondError):
    """The weights could not be fetched, or are not what they should be."""


class EngineError(MillpondError):
    """A fault of the engine that ends one request (500)."""


class EngineDeadError(MillpondError):
    """The engine has stopped and takes no more requests (503)."""


class InvariantError(MillpondError):
    """A broken rule of the scheduler or the block pool: a bug, with the object and both numbers in the message."""


class OverloadedError(MillpondError):
    """The queue is full (429). `bound` says of what, requests or tokens; retry_after is in seconds, at least 1."""

    def __init__(self, message: str, bound: str, retry_after: int) -> None:
        super().__init__(message)
        self.bound = bound
        self.retry_after = retry_after


class DeadlineError(MillpondError):
    """By what was measured, an answer cannot be there in the time that it is of use (503)."""


class RequestTimeoutError(MillpondError):
    """A request that took longer than it may, waiting or in all, or past its deadline (504). `code` says which."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class SlowReaderError(MillpondError):
    """The client does not read what is sent to it, so that its answer was ended."""
