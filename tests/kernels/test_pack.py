"""Weights go into the tiles' layouts and come out again as they were, also one row at a time for the embedding."""

import numpy as np
import pytest

from millpond.kernels.embedding import embed, half
from millpond.kernels.matmul import BF16, COLUMNS, F32_WEIGHTS, GROUP, U4, U8
from millpond.kernels.pack import Packed, channel_weights, pack_affine, pack_float, padded, round_to_bf16, unpack

SHAPES = [(48, 32), (1, 32), (47, 64), (49, 96), (144, 160), (100, 32)]
KINDS = {"U4": U4, "U8": U8, "BF16": BF16, "F32": F32_WEIGHTS}

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def packed_and_expected(kind: int, shape: tuple[int, int], seed: int = 0) -> tuple[Packed, np.ndarray]:
    """A random layer of a kind, and the float32 matrix that went into it."""
    rng = np.random.default_rng(seed)
    if kind in (BF16, F32_WEIGHTS):
        weights = rng.standard_normal(shape).astype(np.float32)
        rounded = (round_to_bf16(weights).astype(np.uint32) << 16).view(np.float32)
        return pack_float(weights, kind), weights if kind == F32_WEIGHTS else rounded
    bits = 4 if kind == U4 else 8
    codes = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
    scale, offset = rng.standard_normal((2, shape[0], shape[1] // GROUP)).astype(np.float16)
    wide = [np.repeat(each.astype(np.float32), GROUP, axis=1) for each in (scale, offset)]
    return pack_affine(codes, scale, offset, bits), wide[0] * codes + wide[1]


@every_shape
@every_kind
def test_what_is_packed_comes_out_as_it_was(kind, shape):
    packed, expected = packed_and_expected(kind, shape)
    assert (packed.kind, packed.columns, packed.depth) == (kind, *shape)
    np.testing.assert_array_equal(unpack(packed), expected)


@every_shape
@every_kind
def test_an_embedding_row_is_exactly_the_row_that_was_packed(kind, shape):
    packed, _ = packed_and_expected(kind, shape)
    descriptor, row = np.array(packed.descriptor(), np.int64), np.empty(shape[1], np.float32)
    for token in {0, shape[0] // 2, shape[0] - 1}:
        row[:] = np.nan
        embed(descriptor, token, row)
        np.testing.assert_array_equal(row, unpack(packed)[token])


def test_codes_of_all_ones_and_the_extremes_of_a_scale_survive():
    codes = np.array([[0, 255] * 16, [255] * 32, [0] * 32], np.uint8)
    scale = np.array([[65504], [2**-24], [-(2**-14)]], np.float16)  # the largest, the smallest and a negative one
    offset = np.array([[-65504], [0], [6e-8]], np.float16)
    packed, row = pack_affine(codes, scale, offset, 8), np.empty(32, np.float32)
    expected = scale.astype(np.float32) * codes + offset.astype(np.float32)
    np.testing.assert_array_equal(unpack(packed), expected)
    for token in range(3):
        embed(np.array(packed.descriptor(), np.int64), token, row)
        np.testing.assert_array_equal(row, expected[token])


@pytest.mark.parametrize("kind", [U4, U8], ids=["U4", "U8"])
def test_the_weights_of_some_channels_are_exactly_those_that_were_packed(kind):
    packed, _ = packed_and_expected(kind, (50, 96))
    channels = np.array([0, 3, 4, 7, 8, 31, 32, 95])
    got = channel_weights(packed, channels)
    assert (got.shape, got.dtype, got.flags.c_contiguous) == ((2, len(channels), COLUMNS), np.float32, True)
    np.testing.assert_array_equal(got.swapaxes(1, 2).reshape(-1, len(channels))[:50], unpack(packed)[:, channels])


def test_the_columns_after_the_last_are_zeros():
    packed, _ = packed_and_expected(F32_WEIGHTS, (50, 32))
    whole = packed.weights.transpose(0, 2, 1).reshape(padded(50), 32)
    assert not whole[50:].any()
    affine, _ = packed_and_expected(U8, (50, 32))
    assert not affine.scales.reshape(2, 1, 2, COLUMNS)[1, :, :, 2:].any()


@pytest.mark.parametrize(("columns", "expected"), [(1, 48), (48, 48), (49, 96), (96, 96)])
def test_columns_are_rounded_up_to_whole_tiles(columns, expected):
    assert padded(columns) == expected


def test_half_is_exact_for_every_finite_bit_pattern():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    got = np.array([half(bits) for bits in halves.view(np.uint16).tolist()], np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), halves.astype(np.float32).view(np.uint32))
