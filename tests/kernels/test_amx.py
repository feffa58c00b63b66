"""Many rows through AMX: the bits are those of the vector code, whatever the shape and however many rows there are."""

import threading
from functools import cache

import numpy as np
import pytest

from kernels import slow_linear
from millpond.kernels.isa import runnable
from millpond.kernels.matmul import (
    ADDS,
    AMX_ROWS,
    GROUP,
    HALF,
    MANY_ROWS,
    MOST_OUTLIERS,
    OUTLIER_COUNT,
    OUTLIERS,
    ROW_BLOCK,
    U4,
    U8,
    U8_BYTES,
    input_stride,
    linear,
    rows_at_once,
)
from millpond.kernels.pack import pack_affine, padded
from millpond.kernels.pointwise import prepare
from millpond.kernels.threads import new_sync
from millpond.kernels.tiles import load_tiles

pytestmark = pytest.mark.skipif("amx" not in runnable(), reason="this processor has no AMX, or may not use it")

INTEGERS = {"U4": U4, "U8": U8}
every_kind = pytest.mark.parametrize("kind", INTEGERS.values(), ids=INTEGERS)
CHANNELS = np.array([0, 7, 63, 64, 100, 127], np.int64)
# columns (whole tiles or not) and inputs: one group, two, an odd and an even number of them
SHAPES = [(48, 64), (48, 128), (50, 192), (97, 576), (300, 320), (144, 1536)]


@cache
def tiles_for(isa):
    return load_tiles(isa, 1, kinds=INTEGERS.values(), kv_dtype=np.float32, heads_per_kv=1, head_dim=16)


class Layer:
    """Random weights of one kind, and rows for them."""

    def __init__(self, kind, columns, depth, rows, *, channels=(), seed=0):
        rng = np.random.default_rng([seed, kind, columns, depth])
        bits = 4 if kind == U4 else 8
        codes = rng.integers(0, 1 << bits, (columns, depth), dtype=np.uint8)
        scale = (rng.uniform(0.5, 1.5, (columns, depth // HALF)) / 2**bits).astype(np.float16)
        self.packed = pack_affine(codes, scale, scale * np.float16(-(2 ** (bits - 1))), bits)
        self.channels, self.exact = np.array(channels, np.int64), np.zeros((padded(columns), len(channels)), np.float32)
        self.exact[:columns] = rng.standard_normal((columns, len(channels)))
        self.packed.put_outliers(self.exact[:columns])
        self.descriptor = np.array(self.packed.descriptor(), np.int64)
        if len(channels):
            self.descriptor[[OUTLIER_COUNT, OUTLIERS]] = len(channels), self.channels.ctypes.data
        self.x = rng.standard_normal((rows, depth)).astype(np.float32)
        self.x[:, self.channels] *= 100
        self.inputs = np.zeros(rows * input_stride.py_func(self.descriptor), np.uint8)
        self.sums = np.full((rows, depth // GROUP * 2 + MOST_OUTLIERS), np.nan, np.float32)
        for row in range(rows):
            place = self.inputs.ctypes.data + row * input_stride.py_func(self.descriptor)
            prepare(self.descriptor, self.x[row].copy(), 0, place, self.sums[row].ctypes.data)

    def run(self, isa, rows, *, start=None, team=1) -> np.ndarray:
        """The outputs of the first rows, added to `start` where it is given; what is behind them must stay."""
        room = np.full((rows + AMX_ROWS, padded(self.packed.columns) + 16), 7.5 if start is None else start, np.float32)
        layer, sync, tiles = self.descriptor.copy(), new_sync(team), tiles_for(isa)
        layer[ADDS] = start is not None
        before = room.copy()

        def work(thread):
            scratch = np.zeros(self.packed.depth // GROUP * U8_BYTES, np.uint8)
            linear(tiles, sync, thread, layer, rows, self.inputs, self.sums, room, scratch)

        workers = [threading.Thread(target=work, args=(i,)) for i in range(1, team)]
        for worker in workers:
            worker.start()
        work(0)
        for worker in workers:
            worker.join()
        assert sync[0, 0] == padded(self.packed.columns) // 48 * -(-rows // rows_at_once.py_func(rows, team)), (
            "items done"
        )
        np.testing.assert_array_equal(room[rows:], before[rows:])
        np.testing.assert_array_equal(room[:, -16:], before[:, -16:])
        return room[:rows, :-16]


def same_bits(got, expected, what=""):
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32), err_msg=what)


@every_kind
@pytest.mark.parametrize("channels", [(), CHANNELS], ids=["plain", "outliers"])
def test_any_number_of_rows_has_the_bits_of_the_vector_code(kind, channels):
    layer = Layer(kind, 97, 320, 200, channels=channels)
    whole = layer.run("avx512", 200)
    for rows in range(1, 201):
        same_bits(layer.run("amx", rows), whole[:rows], f"{rows} rows")


@every_kind
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_any_shape_has_the_bits_of_the_vector_code(kind, columns, depth):
    layer = Layer(kind, columns, depth, 75, channels=[0, 7, 63])
    for rows in (MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1, 48, 75):
        same_bits(layer.run("amx", rows), layer.run("avx512", rows), f"{rows} rows")


@every_kind
@pytest.mark.parametrize("rows", [MANY_ROWS, MANY_ROWS + 1, 47, ROW_BLOCK - 1, ROW_BLOCK + 2, ROW_BLOCK + 40])
def test_rows_that_go_through_twice_are_added_once(kind, rows):
    layer = Layer(kind, 50, 192, rows, channels=[1, 190])
    same_bits(layer.run("amx", rows, start=-0.0), layer.run("avx512", rows, start=-0.0))
    same_bits(layer.run("amx", rows, start=0.75), layer.run("avx512", rows, start=0.75))


@every_kind
def test_the_results_are_those_of_the_slow_reference(kind):
    layer = Layer(kind, 97, 320, 70, channels=CHANNELS)
    expected = slow_linear.linear(layer.packed, layer.x, layer.channels, layer.exact, None)
    np.testing.assert_array_equal(layer.run("amx", 70), expected)


@every_kind
def test_threads_that_share_the_rows_each_have_registers_of_their_own(kind):
    layer = Layer(kind, 300, 320, 150)
    alone = layer.run("avx512", 150)
    for _ in range(5):
        same_bits(layer.run("amx", 150, team=2), alone)


@every_kind
def test_sums_as_large_as_they_can_be_are_whole(kind):
    layer = Layer(kind, 48, 128, MANY_ROWS)
    layer.x[:] = np.where(np.arange(MANY_ROWS) % 2, -1, 1)[:, None]
    layer = layer_of(layer, layer.x)
    same_bits(layer.run("amx", MANY_ROWS), layer.run("avx512", MANY_ROWS))
    expected = slow_linear.linear(layer.packed, layer.x, layer.channels, layer.exact, None)
    np.testing.assert_array_equal(layer.run("amx", MANY_ROWS), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    layer = Layer(U4, 48, 128, 40)
    layer.x[33, 5] = bad
    outputs = layer_of(layer, layer.x).run("amx", 40)
    assert not np.isfinite(outputs[33]).any()
    assert np.isfinite(np.delete(outputs, 33, axis=0)).all()


def layer_of(layer, x) -> Layer:
    """The same weights with other rows."""
    for row, values in enumerate(x):
        place = layer.inputs.ctypes.data + row * input_stride.py_func(layer.descriptor)
        prepare(layer.descriptor, values.copy(), 0, place, layer.sums[row].ctypes.data)
    layer.x = x
    return layer
