"""How many threads, and how they walk a step together: one parallel region, cut into phases.

Inside a phase, work items are taken from a counter, so that a core that is slowed down by its neighbours takes fewer.
A phase is over when its items are done, not when every thread has come by: one that was off its core catches up
without holding the others back. Which thread does an item never changes the item's result.
"""

import os
import platform
import sys
import time
from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.errors import ConfigError
from millpond.kernels.simd import I32, I64, address

CACHE_LINE = 8  # int64 per 64 bytes: each counter has a line of its own
COUNTERS = 2 * CACHE_LINE  # a phase has two: the next item to take, and how many are done
# Where phases are timed, two numbers beside the second counter are when the phase was over, and two more, in the first
# phase, when the step began; the last number of all says whether they are.
ENDED, BEGAN = CACHE_LINE + 1, CACHE_LINE + 3
TIMED = -1
CLOCK = getattr(time, "CLOCK_MONOTONIC", -1)
# A wait begins as a spin, for the other thread is nearly always about to finish. Then it offers its core every
# SPINS_PER_YIELD spins, in case the other thread is queued behind it; and at last it naps, so that the core falls idle
# and the system moves over who waits for one elsewhere.
SPINS_BEFORE_YIELD = 2048
SPINS_PER_YIELD = 64
SPINS_BEFORE_NAP = 32768
NAP_MICROSECONDS = 50
MOST_AT_ONCE = 16


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, cut to the cgroup's quota (rounded up), never the host's count."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    quota = cgroup_quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(-(-quota // 1))))


def cgroup_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The cgroup's processor quota in cores (version 2's cpu.max, or version 1's pair of files); None where unlimited
    or not to be made out."""
    words = _words(cgroup / "cpu.max") or [
        *_words(cgroup / "cpu" / "cpu.cfs_quota_us"),
        *_words(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", no files, or nothing that makes sense
        return None
    return quota / period if quota > 0 and period > 0 else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def thread_count(setting: int | None) -> int:
    """The number of threads to run with; raises ConfigError when more are asked for than Numba may start."""
    most = numba.config.NUMBA_NUM_THREADS
    if setting is not None and setting > most:
        raise ConfigError(f"threads is {setting}, but this process may start at most {most}")
    return setting or min(usable_cores(), most)


@intrinsic
def atomic_add(typingctx, where, amount):
    """Add to the int64 at an address; returns the value before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, where):
    """The int64 at an address, with everything that was written before it was stored."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def relax(typingctx):
    """Tell the processor that this is a spinning loop."""

    def codegen(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def give_way(typingctx):
    """Let another thread have this core (nothing to do where there is no sched_yield)."""

    def codegen(context, builder, signature, args):
        if sys.platform != "win32":
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield")
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def nap(typingctx, microseconds):
    """Sleep, for what the system makes of the given time (nothing to do where there is no usleep)."""

    def codegen(context, builder, signature, args):
        if sys.platform != "win32":
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [I32]), "usleep")
            builder.call(function, [builder.trunc(args[0], I32)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def clock_into(typingctx, where):
    """Put the system's steady clock, two int64 (seconds, nanoseconds), at an address; nothing where there is none."""

    def codegen(context, builder, signature, args):
        if CLOCK >= 0:
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(I32, [I32, I64.as_pointer()]), "clock_gettime"
            )
            builder.call(function, [I32(CLOCK), builder.inttoptr(args[0], I64.as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def time_phases(sync: NDArray[np.int64], on: bool) -> None:
    """Whether the steps that use these counters note when each phase was over: a clock reading for each phase."""
    sync[TIMED] = on


def phase_clock(sync: NDArray[np.int64]) -> NDArray[np.int64]:
    """When the last timed step began, then when each phase of it was over: nanoseconds of time.CLOCK_MONOTONIC, 0 for
    a phase that was not walked."""
    counters = sync.reshape(-1, COUNTERS)
    readings = np.vstack([counters[:1, BEGAN : BEGAN + 2], counters[:, ENDED : ENDED + 2]])
    return readings[:, 0] * 1_000_000_000 + readings[:, 1]


@njit(cache=True, nogil=True)
def start_phases(sync):
    """Set all counters to 0, before the threads start (a function of its own, or Numba makes it a parallel loop)."""
    sync[:TIMED] = 0
    if sync[TIMED]:
        clock_into(address(sync) + 8 * BEGAN)


@njit(cache=True, nogil=True)
def take(sync, phase, count):
    """The first of the next `count` work items of a phase (0, 1, 2, ...)."""
    return atomic_add(address(sync) + 8 * COUNTERS * phase, count)


@njit(cache=True, nogil=True)
def done(sync, phase, count):
    """Say that `count` items of a phase are done, and everything that they wrote is there to read."""
    atomic_add(address(sync) + 8 * (COUNTERS * phase + CACHE_LINE), count)


@njit(cache=True, nogil=True)
def wait_for(sync, phase, items):
    """Return once all the items of a phase are done, whoever did them."""
    where, spins = address(sync) + 8 * (COUNTERS * phase + CACHE_LINE), 0
    while atomic_load(where) < items:
        relax()
        spins += 1
        if spins > SPINS_BEFORE_YIELD and spins % SPINS_PER_YIELD == 0:
            if spins < SPINS_BEFORE_NAP:
                give_way()
            else:
                nap(NAP_MICROSECONDS)
    if sync[TIMED] and sync[COUNTERS * phase + ENDED] == 0:  # the first to see it
        clock_into(address(sync) + 8 * (COUNTERS * phase + ENDED))


@njit(nogil=True)  # not cached: Numba cannot call a generator that it has loaded; in its callers' cache it is whole
def shared_items(sync, phase, items, threads):
    """The items of a phase that fall to this thread, a few at a time; at its end, all items of the phase are done.

    A few: two threads that count one by one spend more on passing the counters to and fro than on a row's work.
    """
    count = min(max(items // (8 * threads), 1), MOST_AT_ONCE)
    item = take(sync, phase, count)
    while item < items:
        end = min(item + count, items)
        for each in range(item, end):  # noqa: UP028 (Numba has no `yield from`)
            yield each
        done(sync, phase, end - item)
        item = take(sync, phase, count)
    wait_for(sync, phase, items)
