"""Gate and up by AMX: what comes of both at once has the bits of one after the other."""

import threading
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from numba import njit

from kernels.test_amx import KINDS, ROW_COUNTS, every_kind, random_layer
from millpond.kernels.amx_gate import GATES
from millpond.kernels.isa import runnable
from millpond.kernels.matmul import DESCRIPTOR_SIZE, GROUP, MOST_OUTLIERS, ROW_BLOCK, UNIT, input_stride
from millpond.kernels.pack import aligned_zeros, new_unpacked
from millpond.kernels.pointwise import prepare
from millpond.kernels.threads import new_sync
from millpond.kernels.tiles import load_tiles
from millpond.model.forward import DOWN, GATE_UP, gate_up_pairs, gate_up_units

pytestmark = pytest.mark.skipif("amx" not in runnable(), reason="this processor has no AMX, or may not use it")

UNTOUCHED = 0xAB


class Weights(NamedTuple):
    ffn_size: int
    gelu: int


class Scratch(NamedTuple):
    sync: np.ndarray
    inputs: np.ndarray
    sums: np.ndarray
    ffn: np.ndarray
    ffn_inputs: np.ndarray
    ffn_sums: np.ndarray
    unpacked: np.ndarray


@njit(nogil=True)
def at_once(tiles, thread, weights, layer, rows, scratch):
    gate_up_pairs(tiles, thread, weights, layer, rows, scratch)


@njit(nogil=True)
def one_after_the_other(tiles, thread, weights, layer, rows, scratch):
    gate_up_units(tiles, thread, weights, layer, rows, scratch)


@cache
def tiles(gate):
    return load_tiles("amx", 1, kinds=KINDS.values(), kv_dtype=np.float32, heads_per_kv=1, head_dim=16, gate=gate)


class Block:
    """Gate, up and down of random weights, and rows for them."""

    def __init__(self, kind, ffn_size, depth, rows, gate="silu"):
        units = -(-ffn_size // UNIT)
        self.packed = random_layer(kind, 2 * UNIT * units, depth), random_layer(kind, 48, ffn_size)
        self.layer = np.zeros((4, DESCRIPTOR_SIZE), np.int64)
        self.layer[[GATE_UP, DOWN]] = [each.descriptor("amx") for each in self.packed]
        self.ffn_size, self.gate, stride = ffn_size, gate, input_stride.py_func(self.layer[GATE_UP])
        self.inputs = aligned_zeros(rows * stride)
        # sums of about 1: of what is below 2**-126, AVX512's rounding makes a zero
        self.x = (np.random.default_rng(rows).standard_normal((rows, depth)) / depth**0.5).astype(np.float32)
        for row, values in enumerate(self.x):
            prepare(self.layer[GATE_UP], values.copy(), 0, self.inputs.ctypes.data + row * stride, 0)

    def run(self, function, rows, team=1):
        """What the first rows give, bfloat16 [rows, ffn_size]; nothing may be written behind them."""
        stride = input_stride.py_func(self.layer[DOWN])
        room = aligned_zeros((rows + 1) * stride)
        room[:] = UNTOUCHED
        scratch = Scratch(
            new_sync(team),
            self.inputs,
            np.zeros((rows, self.x.shape[1] // GROUP * 2 + MOST_OUTLIERS), np.float32),
            aligned_zeros((team, ROW_BLOCK, 2 * UNIT), np.float32),
            room,
            np.zeros((rows, self.ffn_size // GROUP * 2 + MOST_OUTLIERS), np.float32),
            new_unpacked(2 * self.x.shape[1], team),
        )
        weights = Weights(self.ffn_size, GATES[self.gate])
        calls = [(tiles(self.gate), thread, weights, self.layer, rows, scratch) for thread in range(team)]
        workers = [threading.Thread(target=function, args=each) for each in calls[1:]]
        for worker in workers:
            worker.start()
        function(*calls[0])
        for worker in workers:
            worker.join()
        assert (room[rows * stride :] == UNTOUCHED).all()
        return room.view(np.uint16).reshape(rows + 1, -1)[:rows, : self.ffn_size]


@every_kind
@pytest.mark.parametrize("gate", GATES)
# units, whole or not; steps of two times 16 inputs, fewer and more than rows that wait
@pytest.mark.parametrize(("ffn_size", "depth"), [(192, 64), (256, 192), (64, 576), (576, 1088)])
def test_both_at_once_have_the_bits_of_one_after_the_other(kind, gate, ffn_size, depth):
    block = Block(kind, ffn_size, depth, max(ROW_COUNTS), gate)
    expected = block.run(one_after_the_other, max(ROW_COUNTS))
    assert len(np.unique(expected)) > 100
    for rows in ROW_COUNTS:
        np.testing.assert_array_equal(block.run(at_once, rows), expected[:rows], err_msg=f"{rows} rows")


@every_kind
def test_rows_of_the_next_block_and_of_other_threads_too(kind):
    rows = ROW_BLOCK + 40
    block = Block(kind, 320, 128, rows)
    expected = block.run(one_after_the_other, rows)
    for team in (1, 2):
        np.testing.assert_array_equal(block.run(at_once, rows, team), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    block = Block(KINDS["U4"], 192, 128, 40)
    alone = block.run(at_once, 40)
    stride = input_stride.py_func(block.layer[GATE_UP])
    row = block.x[33].copy()
    row[5] = bad
    prepare(block.layer[GATE_UP], row, 0, block.inputs.ctypes.data + 33 * stride, 0)
    got = block.run(at_once, 40)
    others = np.arange(40) != 33
    np.testing.assert_array_equal(got[others], alone[others])
    assert not np.isfinite((got[33].astype(np.uint32) << 16).view(np.float32)).all()
