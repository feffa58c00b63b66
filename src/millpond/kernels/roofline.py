"""What the machine itself can do, from probes in the language of the tiles: bytes read and products summed a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numba
import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.kernels.amx import configure, load_tile, store_tile, tile_call
from millpond.kernels.isa import AMX, AVX512, ISAS, vectors_of
from millpond.kernels.link import call, entry_point
from millpond.kernels.matmul import AMX_ROWS, LINE, linear
from millpond.kernels.simd import I64, V16F32, V16I32, Ir, address
from millpond.kernels.threads import clock_into, enter, leave, new_sync

DOT_U8S8, DOT_BF16, FMA_F32, READ = range(4)
DOTS = {"u8 x s8": DOT_U8S8, "bf16": DOT_BF16, "float32": FMA_F32}
PRODUCTS = {DOT_U8S8: 64, DOT_BF16: 32, FMA_F32: 16}  # of one vector instruction's worth
# Of AMX's instruction, which sums the products of 16 rows of 64 bytes and 16 columns, so many stand in a round, each
# with sums of its own. Integers do not go through AMX.
AMX_TILES = 4
TILE_BYTES = AMX_ROWS * LINE
WEIGHT_VECTORS, ROWS = 3, 4  # as in a matmul tile: so many vectors of weights meet so many rows
DOT_ROUNDS = 1 << 16
PIECE = 2048  # bytes: the keys of one head in a block of 16 positions
LINES = PIECE // 64
PAGE = 4096
CHAINS = 8  # sums side by side, so that none waits for the one before

KIB, MIB = 1 << 10, 1 << 20
SMALL_BYTES, MIDDLE_BYTES = 256 * KIB, 4 * MIB  # of a thread: usually in its own cache; in the shared one
LARGE_BYTES = 512 * MIB  # of all threads: in no cache
# A run is short and there are many of them, of which the best counts: a rate is what the machine can give, and a
# neighbour takes from it. Memory's speed is that of a run about as long as a step.
RUN_BYTES, LONG_RUN_BYTES = 16 * MIB, 32 * MIB  # by each thread
LEAST_RUNS, PROBE_SECONDS, PASSES = 20, 0.1, 5


@dataclass(frozen=True, slots=True)
class MachineRates:
    """reads: bytes per second by what is read again and again, the bytes of all threads; the largest is memory.
    scattered: bytes per second of random pieces of 2 KB out of the largest. dots: operations per second, a
    multiplication and an addition being two."""

    threads: int
    isa: str
    reads: dict[int, float]
    scattered: float
    dots: dict[str, float]

    @property
    def memory(self) -> float:
        return self.reads[max(self.reads)]

    def read_rate(self, working_set: int) -> float:
        """Bytes per second of what is read from the smallest place that this many bytes fit in."""
        fitting = [size for size in sorted(self.reads) if working_set <= size]
        return self.reads[fitting[0]] if fitting else self.memory


@intrinsic(prefer_literal=True)
def probe_tile(typingctx, isa, kind, place, count, sink):
    """READ: sum up `count` pieces of 2 KB as int32, whose addresses (int64) are at `place`. The others: `count` times
    12 dot products of what is at `place`: a vector of zeros, three of weights, four of activations.
    The sums, 8 or 12 vectors, go to `sink`."""
    isa_, kind_ = isa.literal_value, kind.literal_value

    def codegen(context, builder, signature, args):
        ir = Ir(builder, isa_)
        place, count, sink = args[2:]
        sums = _read(ir, place, count) if kind_ == READ else _dots(ir, kind_, place, count)
        for i, value in enumerate(sums):
            ir.store(value, sink, 64 * i)
        return context.get_dummy_value()

    return types.void(isa, kind, *[types.int64] * 3), codegen


def _read(ir, table, count):
    def piece(i, sums):
        start, sums = ir.load(I64, ir.at(table, ir.times(i, 8))), list(sums)
        for line in range(LINES):
            sums[line % CHAINS] = ir.b.add(sums[line % CHAINS], ir.load(V16I32, start, 64 * line))
        return sums

    return ir.loop(count, [ir.const(V16I32, 0)] * CHAINS, piece)


def _dots(ir, kind, place, count):
    """The weights pass through an exclusive or with zeros that the compiler cannot know to be zeros: a product that
    stays the same would be computed once."""
    zeros = ir.load(V16I32, place)
    weights = [ir.load(V16I32, place, 64 * (1 + j)) for j in range(WEIGHT_VECTORS)]
    rows = [ir.load(V16I32, place, 64 * (1 + WEIGHT_VECTORS + r)) for r in range(ROWS)]

    def dot(acc, weight, row):
        if kind == DOT_U8S8:
            return ir.dot_u8s8(acc, weight, row)
        if kind == DOT_BF16:
            return ir.dot_bf16(acc, weight, row)
        return ir.fma(ir.b.bitcast(weight, V16F32), ir.b.bitcast(row, V16F32), acc)

    def round_(i, carried):
        weights = [ir.b.xor(w, zeros) for w in carried[:WEIGHT_VECTORS]]
        sums = carried[WEIGHT_VECTORS:]
        pairs = [(w, r) for r in rows for w in weights]
        return weights + [dot(acc, w, r) for acc, (w, r) in zip(sums, pairs, strict=True)]

    start = ir.const(V16I32, 0) if kind == DOT_U8S8 else ir.zero()
    return ir.loop(count, [*weights, *[start] * (WEIGHT_VECTORS * ROWS)], round_)[WEIGHT_VECTORS:]


@intrinsic
def amx_probe_tile(typingctx, place, count, sink):
    """`count` times AMX_TILES times the products of the rows at `place` and the weights behind them, bfloat16 of
    TILE_BYTES each; the sums go to `sink`, one behind the other."""

    def codegen(context, builder, signature, args):
        ir, (place, count, sink) = Ir(builder, AVX512), args
        configure(ir, [(I64(16), 64)] * (2 + AMX_TILES))
        sums = range(2, 2 + AMX_TILES)
        load_tile(ir, 0, place, I64(64))
        load_tile(ir, 1, ir.at(place, TILE_BYTES), I64(64))
        for each in sums:
            tile_call(ir, "tilezero", each)
        ir.loop(count, [], lambda *_: [tile_call(ir, "tdpbf16ps", each, 0, 1) for each in sums] and [])
        for i, each in enumerate(sums):
            store_tile(ir, each, ir.at(sink, i * TILE_BYTES), I64(64))
        tile_call(ir, "tilerelease")
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@njit(cache=True, nogil=True)
def amx_probe(isa, kind, place, count, sink):
    """amx_probe_tile as a function to be compiled on its own and called as probe is."""
    amx_probe_tile(place, count, sink)


@njit(cache=True, nogil=True)
def probe(isa, kind, place, count, sink):
    """probe_tile as a function to be compiled on its own, once for each (isa, kind)."""
    probe_tile(isa, kind, place, count, sink)


@njit(cache=True, nogil=True, parallel=True)
def by_all(entry, places, count, sinks, clocks, sync):
    """Run the probe at address `entry` once in each thread, with its own place and sink, once all of them are here.

    clocks: int64 [threads, 4], the time (seconds, nanoseconds) when each began and ended; sync: a new one (threads.py).
    """
    for thread in prange(places.size):
        enter(sync, thread, places.size)
        leave(sync, thread, 1)
        clock_into(address(clocks, thread))
        call(entry, 0, 0, places[thread], count, address(sinks, thread))
        clock_into(address(clocks, thread) + 16)


@njit(cache=True, nogil=True)
def repeat_linear(count, tiles, sync, layer, rows, inputs, sums, outputs, scratch):
    """linear() so many times, by one thread."""
    for _ in range(count):
        linear(tiles, sync, 0, layer, rows, inputs, sums, outputs, scratch)


class Probes:
    """The probes for one instruction set, run by `threads` threads at once."""

    def __init__(self, isa: str, threads: int) -> None:
        self.isa, self.threads = isa, threads
        level = types.literal(vectors_of(isa))
        kinds = (*DOTS.values(), READ)
        self._entries = [entry_point(probe, level, types.literal(kind), *[types.int64] * 3) for kind in kinds]
        self._products = {kind: WEIGHT_VECTORS * ROWS * each for kind, each in PRODUCTS.items()}
        if ISAS[isa] == AMX:
            self._entries[DOT_BF16] = entry_point(amx_probe, level, types.literal(DOT_BF16), *[types.int64] * 3)
            self._products[DOT_BF16] = AMX_TILES * AMX_ROWS * 16 * PRODUCTS[DOT_BF16]
        self.sinks = np.zeros((threads, max(WEIGHT_VECTORS * ROWS, AMX_TILES * 16), 16), np.int32)

    def run(self, kind: int, places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Run a probe; places: an address for each thread. Returns int64 [threads, 2], when each thread began and ended
        in nanoseconds."""
        numba.set_num_threads(self.threads)
        clocks = np.zeros((self.threads, 4), np.int64)
        by_all(self._entries[kind], places, count, self.sinks, clocks, new_sync(self.threads))
        return clocks[:, ::2] * 1_000_000_000 + clocks[:, 1::2]

    def dot_rate(self, kind: int) -> float:
        """Operations per second of one kind of product: of each thread in its best run, for they share nothing."""
        operands = aligned_ones(PAGE).view(np.int32).reshape(-1, 16)[: 1 + WEIGHT_VECTORS + ROWS]
        operands[0] = 0
        operands[1:] = 0x3F803F80 if kind != FMA_F32 else 0x3F800000  # 1.0 as bfloat16 and as float32
        places = np.full(self.threads, operands.ctypes.data, np.int64)
        runs = many(lambda _: self.run(kind, places, DOT_ROUNDS))
        shortest = np.min([ended - began for began, ended in (run.T for run in runs)], axis=0) / 1e9
        return float((DOT_ROUNDS * self._products[kind] * 2 / shortest).sum())

    def read_rate(self, memory: NDArray[np.uint8], order: NDArray[np.int64] | None = None) -> float:
        """Bytes per second of reading `memory` in the best run, from the first thread's begin to the last one's end.

        Each thread has its part of the pieces, in the given order (int64, a permutation of the pieces; as they lie by
        default); a run goes on where the last one ended.
        """
        pieces = np.arange(memory.size // PIECE) if order is None else order
        own = pieces[: len(pieces) // self.threads * self.threads].reshape(self.threads, -1)
        count = min(max(RUN_BYTES // PIECE, own.shape[1]), LONG_RUN_BYTES // PIECE)
        tables = np.tile(own, -(-count // own.shape[1])) * PIECE + memory.ctypes.data
        windows = tables.shape[1] // count
        places = tables.ctypes.data + np.arange(self.threads) * tables.strides[0]
        runs = many(lambda i: self.run(READ, places + i % windows * count * tables.itemsize, count))
        seconds = min(int(run[:, 1].max() - run[:, 0].min()) for run in runs) / 1e9
        return self.threads * count * PIECE / seconds


def many(run: Callable[[int], NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """What many short runs (numbered from 0) give, a few of which nothing else disturbs."""
    start, runs = time.perf_counter(), [run(0)]
    while len(runs) < LEAST_RUNS or time.perf_counter() - start < PROBE_SECONDS:
        runs.append(run(len(runs)))
    return runs


def aligned_ones(size: int) -> NDArray[np.uint8]:
    """Memory that is there, on a page's border: a vector across two cache lines would be two reads."""
    room = np.ones(size + PAGE, np.uint8)
    first = -room.ctypes.data % PAGE
    return room[first : first + size]


def measure_machine(isa: str, threads: int, notify: Callable[[str], None]) -> MachineRates:
    """Every rate of this machine: the best of a few passes over all the probes, some seconds apart. notify is called
    with the name of each probe before it starts, NUM_PROBES times."""
    probes, memory = Probes(isa, threads), aligned_ones(LARGE_BYTES)
    order = np.random.default_rng(0).permutation(LARGE_BYTES // PIECE)
    sizes = (SMALL_BYTES * threads, MIDDLE_BYTES * threads, LARGE_BYTES)
    work: dict[str | int, Callable[[], float]] = {name: partial(probes.dot_rate, kind) for name, kind in DOTS.items()}
    work |= {size: partial(probes.read_rate, memory[:size]) for size in sizes}
    work["pieces here and there"] = partial(probes.read_rate, memory, order)
    rates = dict.fromkeys(work, 0.0)
    for _ in range(PASSES):
        for name, measure in work.items():
            notify(f"{name} products" if name in DOTS else f"reading {name}{' bytes' * (name in sizes)}")
            rates[name] = max(rates[name], measure())
    *most, scattered = rates.values()
    return MachineRates(
        threads,
        isa,
        dict(zip(sizes, most[len(DOTS) :], strict=True)),
        scattered,
        dict(zip(DOTS, most[: len(DOTS)], strict=True)),
    )


NUM_PROBES = PASSES * (len(DOTS) + 4)
