"""Linear layers against slow references, for every kind of weights, with the bits of a row the same in any company."""

import threading
from functools import cache

import numpy as np
import pytest

from kernels import slow_linear
from kernels.emit import RUNNABLE_ISAS
from millpond.kernels.matmul import (
    ADDS,
    BF16,
    DESCRIPTOR_SIZE,
    F32_WEIGHTS,
    GROUP,
    HALF,
    MOST_OUTLIERS,
    OUTLIER_COUNT,
    OUTLIERS,
    ROW_BLOCK,
    U4,
    U8,
    input_stride,
    linear,
    rows_at_once,
)
from millpond.kernels.pack import new_unpacked, pack_affine, pack_float, padded, round_to_bf16, unpack
from millpond.kernels.pointwise import prepare
from millpond.kernels.threads import new_sync
from millpond.kernels.tiles import load_tiles

INTEGERS = {"U4": U4, "U8": U8}
KINDS = {**INTEGERS, "BF16": BF16, "F32": F32_WEIGHTS}
DEPTH, COLUMNS = 320, 1000  # five groups; 21 tiles, the last not full: one thread takes two at a time
ROW_COUNTS = [*range(1, 10), 41, ROW_BLOCK + 2]  # a tile is unpacked for more rows than 4; the next block is crossed
MANY = 36  # rows that go through an unpacked tile
OUTLIER_CHANNELS = np.array([3, 4, 36, 141, 319], np.int64)  # low and high nibbles, three in one group, the last

INTEGER_CASES = {
    **{name: (kind, None) for name, kind in INTEGERS.items()},
    **{f"{name} with outliers": (kind, OUTLIER_CHANNELS) for name, kind in INTEGERS.items()},
}
FLOAT_CASES = {"BF16": (BF16, None), "F32": (F32_WEIGHTS, None)}
CASES = {**INTEGER_CASES, **FLOAT_CASES}

VECTOR_ISAS = [isa for isa in RUNNABLE_ISAS if isa != "amx"]  # whose layers are in test_amx.py
every_isa = pytest.mark.parametrize("isa", VECTOR_ISAS)
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_integer_case = pytest.mark.parametrize("case", INTEGER_CASES.values(), ids=INTEGER_CASES)
every_float_case = pytest.mark.parametrize("case", FLOAT_CASES.values(), ids=FLOAT_CASES)


@cache
def tiles_for(isa):
    return load_tiles(isa, 1, kinds=KINDS.values(), kv_dtype=np.float32, heads_per_kv=1, head_dim=16)


@cache
def packed(kind):
    rng = np.random.default_rng(kind)
    if kind in (BF16, F32_WEIGHTS):
        return pack_float((rng.standard_normal((COLUMNS, DEPTH)) / np.sqrt(DEPTH)).astype(np.float32), kind)
    bits = 4 if kind == U4 else 8
    codes = rng.integers(0, 1 << bits, (COLUMNS, DEPTH), dtype=np.uint8)
    scale = (rng.uniform(0.5, 1.5, (COLUMNS, DEPTH // HALF)) / 2**bits / np.sqrt(DEPTH)).astype(np.float16)
    layer = pack_affine(codes, scale, scale * np.float16(-(2 ** (bits - 1))), bits)
    layer.put_outliers(outlier_weights(kind)[:COLUMNS])
    return layer


@cache
def outlier_weights(kind) -> np.ndarray:
    """Exact weights that have nothing to do with those in the tiles: float32 [columns of whole tiles, channels]."""
    weights = np.random.default_rng(7 + kind).standard_normal((padded(COLUMNS), len(OUTLIER_CHANNELS)))
    weights[COLUMNS:] = 0
    return (weights / np.sqrt(DEPTH)).astype(np.float32)


def descriptor_of(kind, outliers=None) -> np.ndarray:
    row = np.array(packed(kind).descriptor(None), np.int64)
    assert row.shape == (DESCRIPTOR_SIZE,)
    if outliers is not None:
        row[OUTLIER_COUNT], row[OUTLIERS] = len(outliers), outliers.ctypes.data
    return row


class Prepared:
    """Rows as a layer wants them."""

    def __init__(self, layer, kind, x):
        self.x, self.kind, rows = x, kind, len(x)
        self.inputs = np.zeros(rows * input_stride.py_func(layer), np.uint8)
        self.sums = np.full((rows, DEPTH // GROUP * 2 + MOST_OUTLIERS), np.nan, np.float32)
        for row in range(rows):
            place = self.inputs.ctypes.data + row * input_stride.py_func(layer)
            prepare(layer, x[row].copy(), 0, place, self.sums[row].ctypes.data)

    def values(self) -> np.ndarray:
        """What the rows of a layer that is not integers are worth: float64 [rows, depth]."""
        if self.kind == F32_WEIGHTS:
            return self.x.astype(np.float64)
        return (round_to_bf16(self.x).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run(isa, layer, prepared, rows, *, add=0, start=0.0, team=1) -> np.ndarray:
    """linear() over the first `rows` prepared rows, by `team` threads at once: float32, the columns of whole tiles."""
    outputs = np.full((rows, padded(COLUMNS)), start, np.float32)
    sync, tiles = new_sync(team), tiles_for(isa)
    layer = layer.copy()
    layer[ADDS] = add

    def work(thread):
        scratch = new_unpacked(DEPTH)[0]
        linear(tiles, sync, thread, layer, rows, prepared.inputs, prepared.sums, outputs, scratch)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(1, team)]
    for worker in workers:
        worker.start()
    work(0)
    for worker in workers:
        worker.join()
    assert sync[0, 0] == padded(COLUMNS) // 48 * -(-rows // rows_at_once.py_func(rows, team)), "items done"
    return outputs


def random_rows(count: int) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((count, DEPTH)).astype(np.float32)


def layer_and_rows(case) -> tuple[np.ndarray, Prepared]:
    kind, outliers = case
    layer, x = descriptor_of(kind, outliers), random_rows(max(ROW_COUNTS))
    if outliers is not None:
        x[:, outliers] *= 300
    return layer, Prepared(layer, kind, x)


@cache
def slow_result(name, start=None) -> np.ndarray:
    kind, outliers = INTEGER_CASES[name]
    _, rows = layer_and_rows((kind, outliers))
    channels = () if outliers is None else outliers
    return slow_linear.linear(packed(kind), rows.x, channels, outlier_weights(kind), start)


@pytest.mark.parametrize("name", INTEGER_CASES)
@every_isa
def test_an_integer_layer_gives_the_bits_of_the_slow_reference(isa, name):
    layer, rows = layer_and_rows(INTEGER_CASES[name])
    for count in ROW_COUNTS:
        np.testing.assert_array_equal(run(isa, layer, rows, count), slow_result(name)[:count], err_msg=f"{count} rows")


@every_float_case
@every_isa
def test_a_layer_of_floats_is_its_matrix_times_the_rows(isa, case):
    layer, rows = layer_and_rows(case)
    weights = unpack(packed(case[0])).astype(np.float64)
    expected = rows.values() @ weights.T
    magnitude = np.abs(rows.values()) @ np.abs(weights.T)
    for count in ROW_COUNTS:
        error = np.abs(run(isa, layer, rows, count)[:, :COLUMNS] - expected[:count]) / magnitude[:count]
        assert error.max() < 2e-6, f"{count} rows"


@pytest.mark.parametrize("name", INTEGER_CASES)
def test_the_slow_reference_is_near_the_matrix_times_the_rows(name):
    kind, outliers = INTEGER_CASES[name]
    _, rows = layer_and_rows((kind, outliers))
    weights = unpack(packed(kind)).astype(np.float64)
    if outliers is not None:
        weights[:, outliers] = outlier_weights(kind)[:COLUMNS]
    exact = rows.x.astype(np.float64) @ weights.T
    error = slow_result(name)[:, :COLUMNS] - exact
    assert error.std() < 0.01 * (rows.x.std(axis=0) * weights).std() * np.sqrt(DEPTH)


@every_case
@every_isa
def test_the_columns_that_fill_up_the_last_tile_give_zeros(isa, case):
    layer, rows = layer_and_rows(case)
    for count in (1, MANY):
        assert not run(isa, layer, rows, count, start=np.nan)[:, COLUMNS:].any()


@every_case
@every_isa
def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are(isa, case):
    layer, rows = layer_and_rows(case)
    whole = run(isa, layer, rows, max(ROW_COUNTS))
    for count in ROW_COUNTS:
        np.testing.assert_array_equal(run(isa, layer, rows, count), whole[:count], err_msg=f"{count} rows")


@every_case
@every_isa
@pytest.mark.parametrize("rows_count", [3, 130])
def test_a_rows_bits_do_not_depend_on_how_many_threads_share_the_work(isa, case, rows_count):
    layer, rows = layer_and_rows(case)
    alone = run(isa, layer, rows, rows_count)
    for _ in range(5):
        np.testing.assert_array_equal(run(isa, layer, rows, rows_count, team=2), alone)


@every_case
@every_isa
def test_adding_puts_the_product_onto_what_is_there_exactly_once(isa, case):
    layer, rows = layer_and_rows(case)
    for count in (3, MANY):
        product = run(isa, layer, rows, count, start=np.nan)
        added = run(isa, layer, rows, count, add=1, start=0.75)
        np.testing.assert_array_equal(added, product + np.float32(0.75))


@pytest.mark.parametrize("name", INTEGER_CASES)
@every_isa
def test_what_is_there_comes_after_the_outlier_channels(isa, name):
    layer, rows = layer_and_rows(INTEGER_CASES[name])
    added = run(isa, layer, rows, 3, add=1, start=0.75)
    np.testing.assert_array_equal(added, slow_result(name, 0.75)[:3])


@every_float_case
def test_all_instruction_sets_give_the_same_bits_but_for_the_bfloat16_products_of_avx512(case):
    layer, rows = layer_and_rows(case)
    portable = run("portable", layer, rows, MANY)
    for isa in VECTOR_ISAS:
        other = run(isa, layer, rows, MANY)
        if case[0] == BF16 and isa == "avx512":
            np.testing.assert_allclose(other, portable, rtol=0, atol=2e-6 * np.abs(portable).max())
        else:
            np.testing.assert_array_equal(other, portable, err_msg=isa)


@every_case
@every_isa
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_every_output_of_its_row_and_in_no_other_row(isa, case, bad):
    kind, outliers = case
    layer = descriptor_of(kind, outliers)
    for channel in (36, 40):
        x = random_rows(3)
        x[1, channel] = bad
        outputs = run(isa, layer, Prepared(layer, kind, x), 3)[:, :COLUMNS]
        assert np.isfinite(outputs[[0, 2]]).all()
        assert not np.isfinite(outputs[1]).any()


@every_integer_case
def test_rows_of_vanishing_numbers_have_the_same_bits_on_every_instruction_set(case):
    kind, outliers = case
    layer = descriptor_of(kind, outliers)
    x = random_rows(3) * np.float32([[1e-30], [1e-38], [1e-44]])
    results = [run(isa, layer, Prepared(layer, kind, x), 3) for isa in VECTOR_ISAS]
    for other in results:
        np.testing.assert_array_equal(other, results[0])
        assert np.abs(other[1:]).max() < 1e-36


@every_integer_case
@every_isa
def test_codes_as_large_as_they_can_be_are_summed_without_a_loss(isa, case):
    kind, outliers = case
    layer, x = descriptor_of(kind, outliers), np.repeat(np.float32([[1], [-1]]), DEPTH, axis=1)
    channels = () if outliers is None else outliers
    expected = slow_linear.linear(packed(kind), x, channels, outlier_weights(kind))
    np.testing.assert_array_equal(run(isa, layer, Prepared(layer, kind, x), 2), expected)


@every_isa
@pytest.mark.parametrize("kind", INTEGERS.values(), ids=INTEGERS)
def test_a_channel_taken_out_spares_its_group_the_coarse_scale(isa, kind):
    weights = unpack(packed(kind)).astype(np.float64)
    layer, rows = layer_and_rows((kind, OUTLIER_CHANNELS))

    def error(layer, weights):
        got = run(isa, layer, Prepared(layer, kind, rows.x), len(rows.x))[:, :COLUMNS]
        return np.abs(got - rows.x.astype(np.float64) @ weights.T).max()

    coarse = error(descriptor_of(kind), weights)
    weights[:, OUTLIER_CHANNELS] = outlier_weights(kind)[:COLUMNS]
    assert error(layer, weights) < coarse / 20
