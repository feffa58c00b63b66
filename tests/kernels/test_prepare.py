"""A row as the input of a linear layer: signed 8-bit codes with a scale for each group, bfloat16, or as it is."""

import numpy as np
import pytest

from millpond.kernels.matmul import (
    AMX_U4,
    BF16,
    DEPTH,
    DESCRIPTOR_SIZE,
    F32_WEIGHTS,
    GROUP,
    KIND,
    MAGNITUDES,
    OUTLIER_COUNT,
    OUTLIERS,
    POWER,
    U4,
    U8,
)
from millpond.kernels.pack import round_to_bf16
from millpond.kernels.pointwise import prepare

GUARD = 77  # what must still be there, beyond what a row may write
SMALLEST = 2.0**-149


class Row:
    """A row after `prepare`: its codes or values, and for an integer layer the groups' numbers and the outliers."""

    def __init__(self, x, kind=U4, channels=(), magnitudes=None, power=0):
        self.x = np.array(x, np.float32)
        self.channels = np.array(channels, np.int64)
        layer = np.zeros(DESCRIPTOR_SIZE, np.int64)
        layer[KIND], layer[DEPTH], layer[POWER] = kind, self.x.size, power
        layer[OUTLIER_COUNT], layer[OUTLIERS] = self.channels.size, self.channels.ctypes.data
        layer[MAGNITUDES] = 0 if magnitudes is None else magnitudes.ctypes.data
        self.target = np.full(self.x.size * 4 + 8, GUARD, np.uint8)
        groups = self.x.size // GROUP
        self.numbers = np.full(2 * groups + self.channels.size + 2, GUARD, np.float32)
        prepare(layer, self.x, 0, self.target.ctypes.data, self.numbers.ctypes.data)
        self.codes = self.target[: self.x.size].view(np.int8).astype(np.int64)
        self.scale = self.numbers[: 2 * groups : 2]
        self.correction = self.numbers[1 : 2 * groups : 2].view(np.int32)
        self.outliers = self.numbers[2 * groups : -2]

    def values(self) -> np.ndarray:
        return np.repeat(self.scale.astype(np.float64), GROUP) * self.codes


def random_row(groups=6, seed=0):
    return np.random.default_rng(seed).standard_normal(groups * GROUP).astype(np.float32)


@pytest.mark.parametrize("kind", [U4, U8], ids=["U4", "U8"])
def test_codes_times_their_scale_are_the_row_to_half_a_step(kind):
    x = random_row()
    row = Row(x, kind)
    peaks = np.abs(x.reshape(-1, GROUP)).max(axis=1)
    np.testing.assert_allclose(row.scale, peaks / 127, rtol=1e-6)
    assert np.abs(row.values() - x).max() <= 0.5001 * row.scale.max()
    assert (np.abs(row.values() - x).reshape(-1, GROUP).max(axis=1) <= 0.5001 * row.scale).all()


def test_the_largest_of_each_group_has_the_code_127_with_its_sign():
    x = random_row()
    codes = Row(x).codes.reshape(-1, GROUP)
    where = np.abs(x.reshape(-1, GROUP)).argmax(axis=1)
    signs = np.sign(np.take_along_axis(x.reshape(-1, GROUP), where[:, None], axis=1))
    np.testing.assert_array_equal(np.take_along_axis(codes, where[:, None], axis=1), 127 * signs)
    assert codes.min() >= -127


def test_the_second_number_of_a_group_is_the_sum_of_its_codes_times_128_below_zero():
    row = Row(random_row())
    np.testing.assert_array_equal(row.correction, -128 * row.codes.reshape(-1, GROUP).sum(axis=1))


def test_codes_that_are_all_as_large_as_they_can_be_have_their_sum_too():
    row = Row(np.repeat(np.float32([1, -1]), GROUP))
    np.testing.assert_array_equal(row.correction, [-128 * 127 * GROUP, 128 * 127 * GROUP])


def test_a_group_of_zeros_is_zeros():
    x = random_row()
    x[GROUP : 2 * GROUP] = 0
    row = Row(x)
    assert (row.scale[1], row.correction[1]) == (0, 0)
    assert not row.codes[GROUP : 2 * GROUP].any()
    assert np.abs(row.values() - x).max() <= 0.5001 * row.scale.max()


def test_one_large_value_coarsens_its_own_group_only():
    x = random_row()
    before = Row(x)
    x[GROUP + 8] = 1e6
    after = Row(x)
    assert after.codes[GROUP + 8] == 127
    assert np.abs(np.delete(after.codes[GROUP : 2 * GROUP], 8)).max() == 0
    others = np.delete(np.arange(x.size), np.arange(GROUP, 2 * GROUP))
    np.testing.assert_array_equal(after.codes[others], before.codes[others])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_groups_scale_not_finite(bad):
    x = random_row()
    x[GROUP + 8] = bad
    row = Row(x)
    assert np.isfinite(row.scale).tolist() == [True, False, True, True, True, True]


def row_up_to(largest) -> np.ndarray:
    x = random_row(1).astype(np.float64)
    return (x / np.abs(x).max() * largest).astype(np.float32)


@pytest.mark.parametrize("largest", [1e36, 1e10, 1e-10, 1e-30, 1e-36])
def test_a_group_of_numbers_of_any_size_keeps_to_its_scale(largest):
    x = row_up_to(largest)
    row = Row(x)
    assert np.abs(row.values() - x).max() <= 0.5001 * row.scale[0]
    np.testing.assert_array_equal(row.correction, -128 * row.codes.reshape(-1, GROUP).sum(axis=1))


@pytest.mark.parametrize("largest", [1e-37, 2.0**-126, 1e-40, 7 * SMALLEST, SMALLEST])
def test_a_group_of_vanishing_numbers_counts_as_next_to_nothing(largest):
    row = Row(row_up_to(largest))
    assert np.abs(row.values()).max() <= 1.01 * largest
    np.testing.assert_array_equal(row.correction, -128 * row.codes.reshape(-1, GROUP).sum(axis=1))


def test_a_bfloat16_layer_takes_the_row_rounded_to_nearest_even():
    x = random_row()
    row = Row(x, BF16)
    np.testing.assert_array_equal(row.target[: 2 * x.size].view(np.uint16), round_to_bf16(x))
    assert (row.target[2 * x.size :] == GUARD).all()
    assert (row.numbers == GUARD).all()


@pytest.mark.parametrize("power", [-15, 0, 1, 24])
@pytest.mark.parametrize("kind", [U4, U8], ids=["U4", "U8"])
def test_an_integer_layer_takes_bfloat16_in_pairs_with_one_between_where_amx_multiplies_it(kind, power):
    x = random_row()
    row = Row(x, AMX_U4 + kind, power=power)
    pairs = np.stack([x.reshape(-1, 4)[:, [0, 2]], x.reshape(-1, 4)[:, [1, 3]]], axis=1).ravel()
    expected = round_to_bf16(pairs * np.float32(2.0**power))
    np.testing.assert_array_equal(row.target[: 2 * x.size].view(np.uint16), expected)
    assert (row.target[2 * x.size :] == GUARD).all()
    assert (row.numbers == GUARD).all()


def test_a_bfloat16_layer_takes_the_row_in_its_order_where_amx_multiplies_it():
    x = random_row()
    np.testing.assert_array_equal(Row(x, AMX_U4 + BF16).target, Row(x, BF16).target)


def test_a_float32_layer_takes_the_row_as_it_is():
    x = random_row()
    row = Row(x, F32_WEIGHTS)
    np.testing.assert_array_equal(row.target[: 4 * x.size].view(np.float32), x)
    assert (row.target[4 * x.size :] == GUARD).all()


def test_an_integer_layers_row_writes_its_codes_and_numbers_and_nothing_beyond():
    row = Row(random_row(), channels=[5, 40])
    assert (row.target[row.x.size :] == GUARD).all()
    assert (row.numbers[-2:] == GUARD).all()


def test_outlier_channels_are_kept_as_they_are_and_count_as_zero_in_their_group():
    x = random_row()
    x[[5, 40, 191]] = [1e6, -3e5, np.pi]
    inside = x.copy()
    inside[[5, 40, 191]] = 0
    row, plain = Row(x, channels=[5, 40, 191]), Row(inside)
    np.testing.assert_array_equal(row.outliers, x[[5, 40, 191]])
    np.testing.assert_array_equal(row.codes, plain.codes)
    np.testing.assert_array_equal(row.numbers[:12], plain.numbers[:12])


def test_an_outlier_channel_that_is_not_a_number_leaves_its_group_finite():
    x = random_row()
    x[40] = np.nan
    row = Row(x, channels=[40])
    assert np.isnan(row.outliers).all()
    assert np.isfinite(row.scale).all()


@pytest.mark.parametrize("kind", [U4, U8, BF16, F32_WEIGHTS], ids=["U4", "U8", "BF16", "F32"])
def test_magnitudes_are_summed_up_where_they_are_wanted(kind):
    magnitudes, rows = np.zeros(6 * GROUP, np.float32), [random_row(seed=seed) for seed in range(3)]
    for x in rows:
        Row(x, kind, magnitudes=magnitudes)
    np.testing.assert_allclose(magnitudes, np.abs(rows).sum(axis=0), rtol=1e-6)


def test_asking_for_magnitudes_changes_nothing_else():
    asked, plain = Row(random_row(), magnitudes=np.zeros(6 * GROUP, np.float32)), Row(random_row())
    np.testing.assert_array_equal(asked.target, plain.target)
    np.testing.assert_array_equal(asked.numbers, plain.numbers)
