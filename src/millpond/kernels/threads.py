"""How many threads, and how they walk a step together: one parallel region, cut into phases.

Inside a phase, each thread has a share of the work items, the same rows in every phase, so that it finds most of what
it reads in its own core's caches; one that is through with its own takes from the others', for cores are slowed down by
their neighbours. A phase is over when its items are done, not when every thread has come by: one that was off its core
catches up without holding the others back. Which thread does an item never changes the item's result.
"""

import platform
import sys
import time

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.errors import ConfigError
from millpond.kernels.jit import INNER, compiled, inner
from millpond.kernels.simd import I32, I64, address, int_at
from millpond.machine import usable_cores

CACHE_LINE = 8  # int64 per 64 bytes
CLOCK = getattr(time, "CLOCK_MONOTONIC", -1)
# A wait begins as a spin, for the other thread is nearly always about to finish. Then it offers its core every
# SPINS_PER_YIELD spins, in case the other thread is queued behind it; and at last it naps, so that the core falls idle
# and the system moves over who waits for one elsewhere.
SPINS_BEFORE_YIELD = 2048
SPINS_PER_YIELD = 64
SPINS_BEFORE_NAP = 32768
NAP_MICROSECONDS = 50
MOST_AT_ONCE = 16


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
def swapped(typingctx, where, seen, value):
    """Put a value in place of the int64 `seen` at an address; False where something else stands there by now."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "monotonic"), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


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


def new_sync(threads: int) -> NDArray[np.int64]:
    """The numbers that a team of `threads` shares, each in a cache line of its own: [2 * threads + 1, 8].

    Line 0 counts the items done since the step began. Line 1 + t is thread t's share of the phase that it is in: the
    phase's number times 2**32, plus how many items of the share are taken. Line 1 + threads + t is thread t's own: its
    phase, the count of items done at which that is over, and where its clock is noted (time_phases).
    """
    return np.zeros((2 * threads + 1, CACHE_LINE), np.int64)


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


def time_phases(sync: NDArray[np.int64], readings: NDArray[np.int64] | None) -> None:
    """From now on, steps note in readings, zeros [phases + 1, 2], when they began and when each phase was over, in
    seconds and nanoseconds of time.CLOCK_MONOTONIC: a clock reading for each phase. None ends that."""
    sync[len(sync) // 2 + 1 :, 2] = 0 if readings is None else readings.ctypes.data


def phases_walked(sync: NDArray[np.int64]) -> int:
    """How many phases the last step had."""
    return int(sync[-1, 0])


@compiled
def start_phases(sync):
    """Set everything to 0, before the threads start (a function of its own, or Numba makes it a parallel loop)."""
    sync[:, :2] = 0
    if sync[-1, 2]:
        clock_into(sync[-1, 2])


@inner
def enter(sync, thread, items):
    """Enter the next phase, of so many items; returns its number."""
    own = len(sync) // 2 + 1 + thread
    sync[own, 0] += 1
    sync[own, 1] += items
    return sync[own, 0]


@inner
def share_of(sync, owner, items):
    """The first of a phase's items that fall to a thread, and how many: the threads' shares lie side by side."""
    threads = len(sync) // 2
    first = owner * items // threads
    return first, (owner + 1) * items // threads - first


@inner
def take(sync, owner, phase, share, count):
    """The first of the next `count` items of an owner's share (0, 1, 2, ...); -1 where all are taken."""
    where = address(sync) + 8 * CACHE_LINE * (1 + owner)
    seen = atomic_load(where)
    while seen >> 32 <= phase:
        first = seen & 0xFFFFFFFF if seen >> 32 == phase else 0  # else the owner is late: it has not come by yet
        if first >= share:
            break
        if swapped(where, seen, (phase << 32) + min(first + count, share)):
            return first
        seen = atomic_load(where)
    return -1


@inner
def leave(sync, thread, done):
    """Say that this thread did so many items of its phase, and return once all items of the phase are done."""
    where, spins, own = address(sync), 0, sync[len(sync) // 2 + 1 + thread]
    if done:
        atomic_add(where, done)
    while atomic_load(where) < own[1]:
        relax()
        spins += 1
        if spins > SPINS_BEFORE_YIELD and spins % SPINS_PER_YIELD == 0:
            if spins < SPINS_BEFORE_NAP:
                give_way()
            else:
                nap(NAP_MICROSECONDS)
    if own[2]:
        reading = own[2] + 16 * own[0]
        if int_at(reading) == 0:  # the first thread to see that the phase is over
            clock_into(reading)


@njit(**INNER)  # not cached: Numba cannot call a generator that it has loaded; in its callers' cache it is whole
def shared_items(sync, thread, items):
    """The items of a phase that this thread does: its own share, then what is left of the others'. At its end, all
    items of the phase are done."""
    phase, threads, done = enter(sync, thread, items), len(sync) // 2, np.int64(0)
    for turn in range(threads):
        owner = (thread + turn) % threads
        start, share = share_of(sync, owner, items)
        count = min(max(share // 8, 1), MOST_AT_ONCE)
        first = take(sync, owner, phase, share, count)
        while first >= 0:
            end = min(first + count, share)
            for item in range(start + first, start + end):  # noqa: UP028 (Numba has no `yield from`)
                yield item
            done += end - first
            first = take(sync, owner, phase, share, count)
    leave(sync, thread, done)
