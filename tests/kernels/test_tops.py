"""The largest of every 48 logits against numpy's maximum, which lets no NaN slip through either."""

import numpy as np
import pytest
from numba import njit

from millpond.kernels.tops import largest, note_tops, rank_of, row_tops, word_of

ODD = [np.nan, -np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0]


@njit
def noted(rows, c, ldc, tops, ldtops):
    note_tops(rows, c, ldc, tops, ldtops)


@njit
def tops_into(row, tops):
    row_tops(row, tops)


@njit
def largest_of(x):
    return largest(x)


@njit
def ranked(words, ranks, back):
    for i in range(words.size):
        ranks[i] = rank_of(words[i])
        back[i] = word_of(ranks[i])


def tops_of(tiles):
    """note_tops of the middle one of three tiles a row, [rows, 48], between what is larger and must not be touched."""
    rows = len(tiles)
    c, tops = np.full((rows, 144), 1e9, np.float32), np.full((rows, 5), 7, np.float32)
    c[:, 48:96] = tiles
    noted(rows, c[:, 48:].ctypes.data, c.strides[0], tops[:, 2:].ctypes.data, tops.strides[0])
    np.testing.assert_array_equal(tops[:, [0, 1, 3, 4]], 7)
    return tops[:, 2]


@pytest.mark.parametrize("rows", range(1, 14))
def test_of_any_number_of_rows_each_gets_its_largest(rows):
    tiles = np.random.default_rng(rows).standard_normal((rows, 48)).astype(np.float32) - 3
    np.testing.assert_array_equal(tops_of(tiles), tiles.max(axis=1))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("value", ODD)
def test_a_value_counts_at_every_place_of_every_row(rows, value):
    for place in range(rows * 48):
        for others in (-1.5, -np.inf):
            tiles = np.full((rows, 48), others, np.float32)
            tiles.ravel()[place] = value
            np.testing.assert_array_equal(tops_of(tiles), tiles.max(axis=1))


def test_ranks_are_in_the_order_of_the_floats_with_nan_of_either_sign_above_all():
    floats = np.array([-np.inf, -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.4e38, np.inf], np.float32)
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32).view(np.int32)
    words = np.concatenate([floats.view(np.int32), nans])
    ranks, back = np.zeros((2, words.size), np.int32)
    ranked(words, ranks, back)
    assert (np.diff(ranks[: floats.size].astype(np.int64)) > 0).all()
    assert ranks[floats.size :].min() > ranks[: floats.size].max()
    np.testing.assert_array_equal(back, words)


@pytest.mark.parametrize("size", [1, 2, 47, 48, 49, 95, 96, 97, 1000])
def test_a_rows_last_tile_is_what_is_left_of_it(size):
    row = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    tops = np.full(-(-size // 48), np.nan, np.float32)
    tops_into(row, tops)
    np.testing.assert_array_equal(tops, [row[i : i + 48].max() for i in range(0, size, 48)])


@pytest.mark.parametrize("value", ODD)
def test_the_largest_of_a_few_is_numpys(value):
    for place in range(19):
        x = np.full(19, -np.inf, np.float32)
        x[place] = value
        np.testing.assert_array_equal(largest_of(x), x.max())
