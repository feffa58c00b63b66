"""Linear layers by AMX: to the bit those of the slow reference, whatever the shape and however many rows there are."""

import threading
from functools import cache

import numpy as np
import pytest

from kernels import slow_amx
from millpond.kernels.isa import runnable
from millpond.kernels.matmul import (
    ADDS,
    AMX_ROWS,
    BF16,
    GROUP,
    HALF,
    MOST_OUTLIERS,
    ROW_BLOCK,
    U4,
    U8,
    input_stride,
    linear,
    rows_at_once,
)
from millpond.kernels.pack import aligned_zeros, new_unpacked, pack_affine, pack_float, padded, unpack
from millpond.kernels.pointwise import prepare
from millpond.kernels.threads import new_sync
from millpond.kernels.tiles import load_tiles

pytestmark = pytest.mark.skipif("amx" not in runnable(), reason="this processor has no AMX, or may not use it")

INTEGERS = {"U4": U4, "U8": U8}
KINDS = {**INTEGERS, "BF16": BF16}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_integer = pytest.mark.parametrize("kind", INTEGERS.values(), ids=INTEGERS)
# columns (whole tiles or not) and inputs: one group, two, an odd and an even number of them
SHAPES = [(48, 64), (48, 128), (50, 192), (97, 576), (300, 320), (144, 1536)]
# One row, a tile of rows and what is left, two tiles together, and others after them.
ROW_COUNTS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 75, 96, 111, 128]


@cache
def tiles():
    return load_tiles("amx", 1, kinds=KINDS.values(), kv_dtype=np.float32, heads_per_kv=1, head_dim=16)


def random_layer(kind, columns, depth, *, whole=False, seed=0):
    """Random weights; whole: integers of one scale for each group, which nothing but rounding to bfloat16 changes."""
    rng = np.random.default_rng([seed, kind, columns, depth])
    if kind == BF16:
        return pack_float(rng.standard_normal((columns, depth)).astype(np.float32), kind)
    bits = 4 if kind == U4 else 8
    codes = rng.integers(0, 1 << bits, (columns, depth), dtype=np.uint8)
    scale = rng.uniform(0.5, 1.5, (columns, depth // HALF)) / 2**bits
    if whole:
        codes, scale = np.maximum(codes, 1), np.repeat(scale[:, ::2], 2, axis=1)
    scale = scale.astype(np.float16)
    return pack_affine(codes, scale, scale * np.float16(-(2 ** (bits - 1))), bits)


class Layer:
    """A packed layer, and rows for it."""

    def __init__(self, packed, x):
        self.packed, self.x = packed, np.asarray(x, np.float32)
        self.descriptor = np.array(packed.descriptor("amx"), np.int64)
        stride = input_stride.py_func(self.descriptor)
        self.inputs = aligned_zeros(len(x) * stride)
        self.sums = np.full((len(x), packed.depth // GROUP * 2 + MOST_OUTLIERS), np.nan, np.float32)
        for row, values in enumerate(self.x):
            place = self.inputs.ctypes.data + row * stride
            prepare(self.descriptor, values.copy(), 0, place, self.sums[row].ctypes.data)

    def run(self, rows, *, start=None, team=1) -> np.ndarray:
        """The outputs of the first rows, added to `start` where it is given; what is behind them must stay."""
        room = np.full((rows + AMX_ROWS, padded(self.packed.columns) + 16), 7.5 if start is None else start, np.float32)
        layer, sync, before = self.descriptor.copy(), new_sync(team), room.copy()
        layer[ADDS] = start is not None

        def work(thread):
            scratch = new_unpacked(self.packed.depth)[0]
            linear(tiles(), sync, thread, layer, rows, self.inputs, self.sums, room, scratch)

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


def layer_of(kind, columns, depth, rows) -> Layer:
    x = np.random.default_rng(rows).standard_normal((rows, depth))
    return Layer(random_layer(kind, columns, depth), x)


def weights_of(packed) -> np.ndarray:
    """The weights that rows meet, by rows of the identity: [columns of whole tiles, depth]."""
    return Layer(packed, np.eye(packed.depth)).run(packed.depth).T


def same_bits(got, expected, what=""):
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32), err_msg=what)


@every_kind
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_the_results_are_those_of_the_slow_reference(kind, columns, depth):
    layer = layer_of(kind, columns, depth, max(ROW_COUNTS))
    expected = slow_amx.linear(layer.packed, weights_of(layer.packed), slow_amx.bf16(layer.x))
    for rows in ROW_COUNTS:
        same_bits(layer.run(rows), expected[:rows], f"{rows} rows")


@every_kind
def test_any_number_of_rows_has_the_same_bits(kind):
    layer = layer_of(kind, 97, 320, 200)
    whole = layer.run(200)
    for rows in range(1, 201):
        same_bits(layer.run(rows), whole[:rows], f"{rows} rows")


@every_kind
@pytest.mark.parametrize("rows", [ROW_BLOCK - 1, ROW_BLOCK + 2, ROW_BLOCK + 40])
def test_rows_of_the_next_block_have_the_same_bits(kind, rows):
    layer = layer_of(kind, 50, 192, rows)
    each = [Layer(layer.packed, layer.x[row : row + 1]).run(1)[0] for row in range(ROW_BLOCK - 2, rows)]
    same_bits(layer.run(rows)[ROW_BLOCK - 2 :], np.array(each))


@every_kind
@pytest.mark.parametrize("depth", [192, 1536], ids=["fewer steps than rows that wait", "more"])
def test_adding_puts_the_product_onto_what_is_there_exactly_once(kind, depth):
    layer = layer_of(kind, 50, depth, max(ROW_COUNTS))
    for rows in ROW_COUNTS:
        same_bits(layer.run(rows, start=0.75), layer.run(rows) + np.float32(0.75))


@every_kind
@pytest.mark.parametrize("rows", [3, 150])
def test_threads_that_share_the_rows_each_have_registers_of_their_own(kind, rows):
    layer = layer_of(kind, 300, 320, rows)
    alone = layer.run(rows)
    for _ in range(5):
        same_bits(layer.run(rows, team=2), alone)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@every_kind
def test_what_is_not_finite_stays_in_its_row(kind, bad):
    layer = layer_of(kind, 48, 128, 40)
    layer.x[33, 5] = bad
    outputs = Layer(layer.packed, layer.x).run(40)
    assert not np.isfinite(outputs[33]).any()
    assert np.isfinite(np.delete(outputs, 33, axis=0)).all()


def test_bfloat16_weights_are_met_as_they_are():
    packed = random_layer(BF16, 97, 320)
    same_bits(weights_of(packed)[:97], unpack(packed))


@every_integer
@pytest.mark.parametrize("whole", [True, False], ids=["whole steps", "any steps"])
def test_integer_weights_are_met_rounded_to_bfloat16(kind, whole):
    packed = random_layer(kind, 97, 576, whole=whole)
    weights, exact = weights_of(packed), slow_amx.exact_weights(packed)
    same_bits(weights, slow_amx.bf16(weights))
    same_bits(weights, slow_amx.weights_met(packed))
    assert weights[exact != 0].any()
    assert (np.abs(weights - exact) < 2.0**-7 * np.abs(exact) + 2.0**-10 * np.abs(exact).max()).all()
    if whole:
        np.testing.assert_allclose(exact[:97], unpack(packed), rtol=1e-6)


def scaled_layer(kind, power):
    """A layer whose groups' scales are up to 1000 times each other's; all 2 ** power times as large as with 0."""
    rng, middle = np.random.default_rng([kind, 7]), 8 if kind == U4 else 128
    codes = rng.integers(1, 2 * middle, (48, 128), dtype=np.uint8)
    scale = np.repeat(2.0 ** rng.uniform(-10, 0, (48, 2)), 2, axis=1).astype(np.float16).astype(np.float32) * 2.0**power
    return pack_affine(codes, scale.astype(np.float16), -middle * scale, 4 if kind == U4 else 8)


@every_integer
@pytest.mark.parametrize("power", [-4, -3, 5, 12, 15])
def test_weights_of_any_size_are_met_alike(kind, power):
    whole, scaled = (weights_of(scaled_layer(kind, each)) for each in (0, power))
    assert np.abs(scaled).max() > 2.0**power
    same_bits(scaled, whole * np.float32(2.0**power))


@every_integer
def test_a_weight_of_0_is_met_as_next_to_nothing(kind):
    packed = random_layer(kind, 96, 128)
    packed.weights["scales"][1] = 0
    weights = weights_of(packed)
    assert np.abs(weights[48:]).max() <= 2.0**-29 * np.abs(weights).max()


@every_integer
def test_rounding_makes_weights_neither_larger_nor_smaller_on_average(kind):
    packed = random_layer(kind, 960, 576, whole=True)
    exact = slow_amx.exact_weights(packed)
    error = (weights_of(packed) - exact) * np.sign(exact)
    assert abs(error.sum()) < 2e-4 * np.abs(exact).sum()  # cut off without more: 28e-4
    assert error.std() < 2.0**-8 * exact.std()


@every_integer
def test_what_is_a_bfloat16_already_stays_what_it_is(kind):
    bits = 4 if kind == U4 else 8
    codes = np.random.default_rng(1).integers(1, 1 << bits, (48, 128), dtype=np.uint8)
    scale = np.full((48, 4), 2.0**-6, np.float16)
    packed = pack_affine(codes, scale, scale * np.float16(-(2 ** (bits - 1))), bits)
    weights, exact = weights_of(packed), (codes.astype(np.float32) - 2 ** (bits - 1)) / 64
    np.testing.assert_array_equal(unpack(packed), exact)
    np.testing.assert_array_equal(weights[exact != 0], exact[exact != 0])
    assert np.abs(weights[exact == 0]).max() < 2.0**-12 / 64  # of a step: an offset of many steps is taken off


def test_a_nibbles_weight_is_nearer_to_the_file_than_a_whole_code():
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (480, 576), dtype=np.uint8)
    scale, offset = (rng.uniform(0.5, 1.5, (480, 18)).astype(np.float16) for _ in range(2))
    packed = pack_affine(codes, scale, -8 * offset, 4)
    each_scale, each_offset = (np.repeat(values.astype(np.float64), HALF, axis=1) for values in (scale, offset))
    exact = each_scale * codes - 8 * each_offset
    by_codes, by_amx = (np.square(each - exact).mean() for each in (unpack(packed), weights_of(packed)[:480]))
    assert by_amx < 0.5 * by_codes
