"""The probes do the reads and the products that their rates count."""

import ctypes
import time

import numpy as np
import pytest

from kernels.emit import RUNNABLE_ISAS, counted_from
from millpond.kernels import roofline
from millpond.kernels.pack import round_to_bf16
from millpond.kernels.roofline import (
    AMX_TILES,
    DOT_BF16,
    DOT_ROUNDS,
    DOT_U8S8,
    DOTS,
    FMA_F32,
    NUM_PROBES,
    PIECE,
    READ,
    ROWS,
    RUN_BYTES,
    WEIGHT_VECTORS,
    MachineRates,
    Probes,
    aligned_ones,
    measure_machine,
)

every_isa = pytest.mark.parametrize("isa", RUNNABLE_ISAS)
ROUNDS = 5


def operands(kind, isa="portable") -> tuple[np.ndarray, list[np.ndarray]]:
    """Bits for a probe, and the sums of one round: for each row, each vector of weights."""
    rng = np.random.default_rng(kind)
    bits = np.zeros((1 + WEIGHT_VECTORS + ROWS, 16), np.int32)
    if kind == DOT_U8S8:
        codes = rng.integers(1, 256, (7, 64), dtype=np.uint8)
        codes[WEIGHT_VECTORS:] ^= 128  # signed, from -127 on
        bits[1:] = codes.view(np.int32)
        weights = codes[:WEIGHT_VECTORS].astype(np.int64) - counted_from(isa)
        rows = codes[WEIGHT_VECTORS:].view(np.int8).astype(np.int64)
    elif kind == DOT_BF16:
        values = rng.integers(-8, 8, (7, 32)).astype(np.float32)  # small integers: no rounding anywhere
        bits[1:] = round_to_bf16(values).view(np.int32)
        weights, rows = values[:WEIGHT_VECTORS], values[WEIGHT_VECTORS:]
    else:
        values = rng.integers(-8, 8, (7, 16)).astype(np.float32)
        bits[1:] = values.view(np.int32)
        weights, rows = values[:WEIGHT_VECTORS], values[WEIGHT_VECTORS:]
    return bits, [(w * r).reshape(16, -1).sum(axis=1) for r in rows for w in weights]


@pytest.mark.parametrize(
    ("isa", "kind"),
    [(isa, kind) for isa in RUNNABLE_ISAS for kind in DOTS.values() if (isa, kind) != ("amx", DOT_BF16)],
)
def test_every_product_that_a_rate_counts_is_computed(isa, kind):
    bits, once = operands(kind, isa)
    probes = Probes(isa, 1)
    probes.run(kind, np.array([bits.ctypes.data]), ROUNDS)
    sums = probes.sinks[0, : WEIGHT_VECTORS * ROWS]
    sums = sums if kind == DOT_U8S8 else sums.view(np.float32)
    np.testing.assert_array_equal(sums, ROUNDS * np.array(once))


@pytest.mark.skipif("amx" not in RUNNABLE_ISAS, reason="this processor has no AMX, or may not use it")
def test_every_product_of_amx_that_a_rate_counts_is_computed():
    values = np.random.default_rng(0).integers(-99, 99, (2, 16, 32))  # in bfloat16 exactly
    bits = round_to_bf16(values.astype(np.float32))
    probes = Probes("amx", 1)
    probes.run(DOT_BF16, np.array([bits.ctypes.data]), ROUNDS)
    rows, weights = values
    once = rows @ weights.reshape(16, 16, 2).transpose(0, 2, 1).reshape(-1, 16)
    np.testing.assert_array_equal(
        probes.sinks[0].view(np.float32).reshape(AMX_TILES, 16, 16), [ROUNDS * once] * AMX_TILES
    )
    assert probes._products[DOT_BF16] == AMX_TILES * once.size * 32


def test_the_products_of_a_vector_are_those_that_the_rate_multiplies_by():
    for kind in (DOT_U8S8, DOT_BF16, FMA_F32):
        bits, once = operands(kind)
        assert roofline.PRODUCTS[kind] == 64 // {DOT_U8S8: 1, DOT_BF16: 2, FMA_F32: 4}[kind]
        assert len(once) * 16 == bits[0].size * WEIGHT_VECTORS * ROWS


@every_isa
def test_every_byte_that_a_rate_counts_is_read(isa):
    memory = np.random.default_rng(0).integers(-99, 99, 6 * PIECE // 4, dtype=np.int32)
    table = memory.ctypes.data + PIECE * np.array([3, 0, 5, 0])
    probes = Probes(isa, 1)
    probes.run(READ, np.array([table.ctypes.data]), 4)
    pieces = memory.reshape(6, -1)
    np.testing.assert_array_equal(probes.sinks[0][:8].sum(), pieces[[3, 0, 5, 0]].sum())


@pytest.fixture
def runs(monkeypatch):
    """What the probes are asked to run: (kind, what lies at each thread's place). Two threads take half a second in
    turn, then both of them; else one of them waits for the other."""
    seen, second = [], 10**9
    clocks = [
        [[0, second // 2], [second, 2 * second]],
        [[0, second], [second, second + second // 2]],
        [[3 * second, 3 * second + second // 2], [3 * second, 3 * second + second // 2]],
    ]

    def run(self, kind, places, count):
        words = [ctypes.cast(int(place), ctypes.POINTER(ctypes.c_int64 * count)).contents for place in places]
        seen.append((kind, np.array(words) if kind == READ else places))
        return np.array(clocks[len(seen) % len(clocks)][: len(places)])

    monkeypatch.setattr(Probes, "run", run)
    monkeypatch.setattr(roofline, "PROBE_SECONDS", 0.0)
    return seen


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rate_of_products_is_that_of_all_threads(runs, threads):
    instructions = threads * DOT_ROUNDS * WEIGHT_VECTORS * ROWS
    assert Probes("portable", threads).dot_rate(DOT_U8S8) == instructions * 64 * 2 / 0.5
    assert Probes("portable", threads).dot_rate(FMA_F32) == instructions * 16 * 2 / 0.5


def test_the_runs_walk_through_memory_in_parts_that_no_two_threads_share(runs, monkeypatch):
    monkeypatch.setattr(roofline, "LONG_RUN_BYTES", 2 * RUN_BYTES)
    memory = aligned_ones(3 * 2 * 2 * RUN_BYTES)
    rate = Probes("portable", 2).read_rate(memory)
    assert rate == 2 * 2 * RUN_BYTES / 0.5
    pieces = np.concatenate([(table - memory.ctypes.data) // PIECE for _, table in runs[:3]], axis=1)
    np.testing.assert_array_equal(pieces.ravel(), np.arange(memory.size // PIECE))


def test_memory_that_is_shorter_than_a_run_is_read_several_times_over(runs):
    memory = aligned_ones(4 * PIECE)
    assert Probes("portable", 2).read_rate(memory) == 2 * RUN_BYTES / 0.5
    numbers = (runs[0][1] - memory.ctypes.data) // PIECE
    assert [sorted(set(each)) for each in numbers.tolist()] == [[0, 1], [2, 3]]


def test_scattered_pieces_are_read_in_the_order_that_is_asked_for(runs):
    memory = aligned_ones(RUN_BYTES)
    order = np.random.default_rng(1).permutation(RUN_BYTES // PIECE)
    Probes("portable", 1).read_rate(memory, order)
    np.testing.assert_array_equal((runs[0][1][0] - memory.ctypes.data) // PIECE, order)


def test_products_count_by_each_threads_best_run_and_reads_by_the_best_run_of_all(monkeypatch):
    apart = np.array([[0, 500_000_000], [500_000_000, 1_000_000_000]])
    monkeypatch.setattr(Probes, "run", lambda self, kind, places, count: apart)
    monkeypatch.setattr(roofline, "PROBE_SECONDS", 0.0)
    assert Probes("portable", 2).dot_rate(FMA_F32) == 2 * DOT_ROUNDS * WEIGHT_VECTORS * ROWS * 16 * 2 / 0.5
    assert Probes("portable", 2).read_rate(aligned_ones(4 * PIECE)) == 2 * RUN_BYTES / 1.0


def test_a_run_says_when_each_thread_began_and_ended():
    memory = aligned_ones(2 * PIECE)
    tables = memory.ctypes.data + PIECE * np.arange(2)
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    (run,) = Probes("portable", 1).run(READ, np.array([tables.ctypes.data]), 2).tolist()
    times = [before, *run, time.clock_gettime_ns(time.CLOCK_MONOTONIC)]
    assert times == sorted(times)


def test_every_probe_is_announced_in_every_pass_and_its_rate_is_the_best(runs, monkeypatch):
    monkeypatch.setattr(roofline, "LARGE_BYTES", 16 << 20)
    calls = iter(range(1, 1000))
    monkeypatch.setattr(Probes, "dot_rate", lambda self, kind: 100.0 * kind + (7.0, 1.0)[next(calls) % 2])
    monkeypatch.setattr(Probes, "read_rate", lambda self, memory, order=None: memory.size + (order is not None))
    names = []
    rates = measure_machine("portable", 2, names.append)
    assert len(names) == NUM_PROBES == roofline.PASSES * len(set(names))
    assert rates.dots == {name: 100.0 * kind + 7.0 for name, kind in DOTS.items()}
    assert rates.reads == {size: size for size in (512 << 10, 8 << 20, 16 << 20)}
    assert rates.scattered == (16 << 20) + 1


def test_what_fits_a_cache_is_read_at_its_rate_and_all_else_at_that_of_memory():
    rates = MachineRates(1, "portable", {1000: 9.0, 10: 90.0, 100: 50.0}, 1.0, {})
    assert [rates.read_rate(size) for size in (10, 11, 100, 101, 5000)] == [90.0, 50.0, 50.0, 9.0, 9.0]
    assert rates.memory == 9.0
