"""How many instructions a command takes, by the processor's own counter, where the system lets us at it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable

SYSCALL = {"x86_64": 298, "aarch64": 241}  # perf_event_open
HARDWARE, INSTRUCTIONS = 0, 1
INHERIT, EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
CLOSE_ON_EXEC = 8
ATTRIBUTES = "=IIQQQQQIIQ"  # the first version of struct perf_event_attr, 64 bytes
REASONS = {
    errno.ENOENT: "the processor shows no counters here (most virtual machines)",
    errno.EACCES: "the system does not allow it (see /proc/sys/kernel/perf_event_paranoid)",
    errno.EPERM: "the system does not allow it (see /proc/sys/kernel/perf_event_paranoid)",
    errno.ENOSYS: "the system has no perf_event_open",
}


class CountersUnavailableError(Exception):
    """There is no counter to read; the text says why."""


def open_counter(kind: int = HARDWARE, event: int = INSTRUCTIONS, system: Callable[[bytes], int] | None = None) -> int:
    """A descriptor that counts an event in this process and in every process that it starts from now on, outside the
    kernel. Raises CountersUnavailableError."""
    flags = INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR
    attributes = struct.pack(ATTRIBUTES, kind, struct.calcsize(ATTRIBUTES), event, 0, 0, 0, flags, 0, 0, 0)
    try:
        return (system or perf_event_open)(attributes)
    except OSError as error:
        raise CountersUnavailableError(REASONS.get(error.errno or 0, str(error))) from error


def perf_event_open(attributes: bytes) -> int:
    """The system call, for this process on any core. Raises OSError."""
    number = SYSCALL.get(platform.machine())
    if number is None or platform.system() != "Linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(number, ctypes.c_char_p(attributes), 0, -1, -1, ctypes.c_ulong(CLOSE_ON_EXEC))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(descriptor)


def count_during(work: Callable[[], object], opened: Callable[[], int] = open_counter) -> int:
    """Instructions of the processes that `work` starts and waits for. Raises CountersUnavailableError."""
    descriptor = opened()
    try:
        work()
        return int.from_bytes(os.read(descriptor, 8), "little")
    finally:
        os.close(descriptor)
