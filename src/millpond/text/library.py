"""Calls into the tokenizers library, whose errors are plain Exceptions and whose panics are not even those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millpond.errors import MillpondError, shown

PANIC = "PanicException"  # of pyo3: a BaseException that cannot be imported


@contextmanager
def faults_as(error_of: Callable[[str], MillpondError]) -> Iterator[None]:
    """Raise what error_of makes of the library's message in place of whatever it raises."""
    try:
        yield
    except MillpondError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise error_of(shown(str(error))) from None
