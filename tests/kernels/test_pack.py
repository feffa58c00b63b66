"""Weights go into the tiles' layouts as exactly as the layouts can hold them, and come out as what went in."""

import numpy as np
import pytest
from numba import njit

from kernels.slow_linear import integer_weights
from millpond.kernels import pack
from millpond.kernels.embedding import embed, half
from millpond.kernels.matmul import BF16, COLUMNS, F32_WEIGHTS, HALF, MOST_OUTLIERS, OUTLIER_WEIGHTS, POWER, U4, U8
from millpond.kernels.pack import (
    Form,
    Packed,
    empty_layer,
    empty_room,
    pack_affine,
    pack_float,
    padded,
    round_to_bf16,
    side_by_side,
    size_side_by_side,
    unpack,
)

SHAPES = [(48, 64), (1, 64), (47, 128), (49, 192), (144, 320), (100, 64)]
FLOAT_SHAPES = [(48, 32), (49, 96), (144, 160)]
INTEGERS = {"U4": U4, "U8": U8}
FLOATS = {"BF16": BF16, "F32": F32_WEIGHTS}
# In units of a group's scale. A nibble's code is off by what its base is rounded by, from -0.114 to 0.886, by as much
# of that as the step does not make up for, and by the part of step * nibble that is cut off.
LARGEST_ERROR = {4: 1.06, 8: 0.501}
LARGEST_MEAN_ERROR = 0.07

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_integer_kind = pytest.mark.parametrize("kind", INTEGERS.values(), ids=INTEGERS)
every_float_kind = pytest.mark.parametrize("kind", FLOATS.values(), ids=FLOATS)
both_bits = pytest.mark.parametrize("bits", [4, 8])


class Affine:
    """Weights scale * code + offset in halves of a group, packed, and what became of them."""

    def __init__(self, codes, scale, offset, bits):
        self.scale, self.offset = (np.asarray(each, np.float16) for each in (scale, offset))
        self.codes = np.asarray(codes, np.uint8)
        self.packed = pack_affine(self.codes, self.scale, self.offset, bits)
        wide = [np.repeat(each.astype(np.float64), HALF, axis=1) for each in (self.scale, self.offset)]
        self.exact = wide[0] * self.codes + wide[1]

    def units(self) -> np.ndarray:
        """The scale of each weight's group: float64 [columns, depth]."""
        _, scales = integer_weights(self.packed)
        return np.repeat(scales[: len(self.exact)].astype(np.float64), 2 * HALF, axis=1)

    def errors(self) -> np.ndarray:
        """In units of the group's scale; 0 where the scale and all weights are 0."""
        error, units = unpack(self.packed) - self.exact, self.units()
        assert not error[units == 0].any()
        return error / np.where(units == 0, 1, units)


def random_codes(shape, bits, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << bits, shape, dtype=np.uint8)


def normal(shape, bits) -> Affine:
    """Scales and offsets of both signs."""
    scale, offset = np.random.default_rng(1).standard_normal((2, shape[0], shape[1] // HALF))
    return Affine(random_codes(shape, bits), scale, offset, bits)


def symmetric(shape, bits) -> Affine:
    """As Q4_0 and Q8_0 are: the offset is a negative power of two of the scale, which has either sign."""
    scale = np.random.default_rng(1).standard_normal((shape[0], shape[1] // HALF)).astype(np.float16)
    return Affine(random_codes(shape, bits), scale, scale * np.float16(-(1 << (bits - 1))), bits)


def uneven(shape, bits) -> Affine:
    """Scales and offsets of all sizes, or 0, in the halves of one group."""
    rng, halves = np.random.default_rng(1), (2, shape[0], shape[1] // HALF)
    scale, offset = rng.choice([-1, 0, 1], halves) * np.exp2(rng.uniform(-25, 8, halves))
    return Affine(random_codes(shape, bits), scale, offset, bits)


def extreme(shape, bits) -> Affine:
    """Every half reaches from one end of what its group can hold to the other, or nearly."""
    halves = shape[0], shape[1] // HALF
    offset = -np.random.default_rng(1).uniform(1, 1.02, halves)
    return Affine(random_codes(shape, bits), -2 * offset / ((1 << bits) - 1), offset, bits)


every_affine = pytest.mark.parametrize("affine", [normal, symmetric, uneven, extreme])


@both_bits
@every_affine
def test_every_weight_is_within_about_a_unit_of_its_exact_value(affine, bits):
    errors = affine((480, 512), bits).errors()
    assert np.abs(errors).max() <= LARGEST_ERROR[bits]
    assert np.abs(errors).max() > LARGEST_ERROR[bits] / 2, "the bound is far from what there is"


@both_bits
@every_affine
def test_errors_cancel_out(affine, bits):
    assert abs(affine((480, 512), bits).errors().mean()) < LARGEST_MEAN_ERROR


@every_affine
def test_four_bit_codes_are_off_by_little_more_than_a_third_of_a_unit_on_average(affine):
    assert np.sqrt((affine((480, 512), 4).errors() ** 2).mean()) < 0.37


@both_bits
@every_affine
def test_no_code_is_0_or_beyond_a_byte_whatever_the_nibble(affine, bits):
    """The dot products of AVX2 take no code 0; a code beyond a byte would become another one."""
    packed = affine((480, 512), bits).packed
    if bits == 8:
        codes, _ = integer_weights(packed)
    else:
        steps, bases = (packed.weights[name].astype(np.int64)[..., None] for name in ("steps", "bases"))
        codes = bases + (steps * np.arange(16) >> 8)
        assert steps.max() * 15 < 1 << 16, "the kernels multiply in 16 bits"
    assert codes.min() >= 1
    assert codes.max() <= 255


@both_bits
@every_affine
def test_a_groups_scale_is_the_least_float16_in_which_its_largest_weight_is_126(affine, bits):
    weights = affine((96, 256), bits)
    ends = weights.offset.astype(np.float64), weights.offset + weights.scale.astype(np.float64) * ((1 << bits) - 1)
    possible = np.abs(ends).max(axis=0) if bits == 4 else np.abs(weights.exact).reshape(96, -1, HALF).max(axis=2)
    largest = possible.reshape(96, -1, 2).max(axis=2)
    _, scales = integer_weights(weights.packed)
    below = np.nextafter(scales.astype(np.float16), np.float16(-np.inf)).astype(np.float64)
    assert (126.0 * scales.astype(np.float64) >= largest * (1 - 1e-6)).all()
    assert (126.0 * below < largest)[scales > 0].all()


def test_a_weight_too_large_for_a_float16_scale_is_refused():
    scale, offset = np.full((1, 2), 65504, np.float16), np.zeros((1, 2), np.float16)
    pack_affine(np.full((1, 64), 126, np.uint8), scale, offset, 8)
    with pytest.raises(ValueError, match=r"a weight of 8.31901e\+06 is beyond .*, 8.2535e\+06"):
        pack_affine(np.full((1, 64), 127, np.uint8), scale, offset, 8)


@both_bits
def test_zeros_are_zeros_whatever_else_the_group_holds(bits):
    shape = (96, 256)
    scale, offset = np.random.default_rng(0).standard_normal((2, 96, 8)).astype(np.float16)
    scale[:, ::3], offset[:, ::3] = 0, 0
    scale[::5], offset[::5] = 0, 0
    weights = Affine(random_codes(shape, bits), scale, offset, bits)
    assert not unpack(weights.packed)[weights.exact == 0].any()


@both_bits
def test_a_group_whose_weights_are_all_equal_is_near_that_weight(bits):
    value = np.random.default_rng(0).standard_normal((96, 4)).repeat(2, axis=1).astype(np.float16)
    weights = Affine(random_codes((96, 256), bits), np.zeros((96, 8)), value, bits)
    assert np.abs(weights.errors()).max() < 1
    np.testing.assert_allclose(unpack(weights.packed), weights.exact, rtol=0.9 / 125)


def test_a_negative_scale_of_four_bits_packs_as_the_positive_one_with_turned_codes():
    codes, scale = random_codes((96, 256), 4), np.random.default_rng(0).integers(1, 99, (96, 8)).astype(np.float16)
    rising, falling = Affine(codes, scale, -8 * scale, 4), Affine(15 - codes, -scale, 7 * scale, 4)
    np.testing.assert_array_equal(falling.exact, rising.exact)
    np.testing.assert_array_equal(falling.packed.weights, rising.packed.weights)


@both_bits
def test_the_smallest_weights_survive(bits):
    smallest = np.full((1, 2), 2.0**-24, np.float16)
    weights = Affine(random_codes((1, 64), bits), smallest, np.zeros((1, 2)), bits)
    np.testing.assert_allclose(unpack(weights.packed), weights.exact, rtol=0, atol=1.06 * 2.0**-24)


@every_shape
@every_integer_kind
def test_what_is_unpacked_is_read_out_of_the_tiles_as_they_are_drawn(kind, shape):
    packed = normal(shape, 4 if kind == U4 else 8).packed
    assert (packed.kind, packed.columns, packed.depth) == (kind, *shape)
    codes, scales = integer_weights(packed)
    drawn = np.repeat(scales, 2 * HALF, axis=1) * (codes - 128).astype(np.float32)
    np.testing.assert_array_equal(unpack(packed), drawn[: shape[0]])
    assert not scales[shape[0] :].any(), "the columns that fill up the last tile"


@pytest.mark.parametrize("shape", FLOAT_SHAPES, ids=str)
@every_float_kind
def test_floats_that_are_packed_come_out_as_they_were_but_for_bfloat16s_rounding(kind, shape):
    packed, expected = floats(kind, shape)
    assert (packed.kind, packed.columns, packed.depth) == (kind, *shape)
    np.testing.assert_array_equal(unpack(packed), expected)


def floats(kind, shape) -> tuple[Packed, np.ndarray]:
    weights = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    rounded = (round_to_bf16(weights).astype(np.uint32) << 16).view(np.float32)
    return pack_float(weights, kind), weights if kind == F32_WEIGHTS else rounded


@every_shape
@pytest.mark.parametrize("kind", [U4, U8, BF16, F32_WEIGHTS], ids=["U4", "U8", "BF16", "F32"])
def test_an_embedding_row_is_exactly_the_row_that_was_packed(kind, shape):
    packed = floats(kind, shape)[0] if kind in FLOATS.values() else normal(shape, 4 if kind == U4 else 8).packed
    descriptor, row = np.array(packed.descriptor(None), np.int64), np.empty(shape[1], np.float32)
    for token in {0, shape[0] // 2, shape[0] - 1}:
        row[:] = np.nan
        embed(descriptor, token, row)
        np.testing.assert_array_equal(row, unpack(packed)[token])


@both_bits
def test_columns_are_packed_the_same_however_many_go_together(bits, monkeypatch):
    whole = normal((200, 128), bits).packed
    monkeypatch.setattr(pack, "VALUES_AT_ONCE", COLUMNS * 128)
    np.testing.assert_array_equal(normal((200, 128), bits).packed.weights, whole.weights)


def test_outlier_channels_are_kept_by_tile_and_channel():
    layer = normal((50, 64), 4).packed
    exact = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    layer.put_outliers(exact)
    assert layer.outliers.shape == (2, MOST_OUTLIERS, COLUMNS)
    np.testing.assert_array_equal(layer.outliers[:, :3].transpose(0, 2, 1).reshape(96, 3)[:50], exact)
    assert not layer.outliers[1, :, 2:].any(), "the columns that fill up the last tile"
    assert not layer.outliers[:, 3:].any()
    assert layer.descriptor(None)[OUTLIER_WEIGHTS] == layer.outliers.ctypes.data


@every_integer_kind
@pytest.mark.parametrize("largest", [2.0**-24, 2.0**-14, 0.0123, 1.0, 65504.0])
def test_the_largest_scale_decides_how_much_larger_amx_has_the_inputs(kind, largest):
    layer = empty_layer(Form(kind, 96, 128))
    layer.weights["scales"] = np.linspace(0, largest, layer.weights["scales"].size).reshape(2, 2, 48)
    assert 2.0**7 <= float(np.float16(largest)) * 2.0 ** (16 - layer.power()) < 2.0**8
    assert layer.descriptor("amx")[POWER] == layer.power()
    assert layer.descriptor("avx512")[POWER] == layer.descriptor(None)[POWER] == 0


def test_a_layer_of_zeros_has_a_power_too():
    assert abs(pack_affine(np.zeros((48, 64), np.uint8), *np.zeros((2, 48, 2), np.float16), 4).power()) < 100


@every_float_kind
def test_the_inputs_of_weights_that_amx_takes_as_they_are_stay_as_they_are(kind):
    assert pack_float(np.ones((48, 64), np.float32), kind).descriptor("amx")[POWER] == 0


def test_layers_side_by_side_share_no_byte_and_begin_on_cache_lines():
    forms = [
        Form(kind, columns, 128) for kind, columns in zip((U4, U8, BF16, F32_WEIGHTS), (50, 1, 96, 7), strict=True)
    ]
    room = empty_room(size_side_by_side(forms))
    room[:] = 0
    layers = side_by_side(forms, room)
    for i, layer in enumerate(layers):
        arrays = [layer.weights] if layer.outliers is None else [layer.weights, layer.outliers]
        assert (layer.outliers is not None) == (layer.kind <= U8)
        for array in arrays:
            assert array.ctypes.data % 64 == 0
            seen = array.view(np.uint8)
            assert not seen.any(), "another layer's"
            seen[:] = i + 1
    assert room.all()


@pytest.mark.parametrize("kind", [U8, BF16, F32_WEIGHTS], ids=["U8", "BF16", "F32"])
def test_values_that_are_put_in_piece_by_piece_are_those_put_in_at_once(kind):
    weights = np.random.default_rng(0).standard_normal((150, 128)).astype(np.float32)
    whole, pieces = (pack.empty_layer(Form(kind, 150, 128)) for _ in range(2))
    for layer in (whole, pieces):
        layer.weights.view(np.uint8)[...] = 0xFF  # what was in the memory before
    pack.put_values(whole, 0, weights)
    pack.put_values(pieces, 96, weights[96:])
    pack.put_values(pieces, 0, weights[:96])
    assert pieces.weights.tobytes() == whole.weights.tobytes()
    assert np.abs(unpack(whole) - weights).max() < 4 / 126
    if kind == U8:
        assert not pieces.outliers.any()


def test_values_rounded_to_8_bits_are_as_the_affine_form_of_the_same_values():
    affine = normal((50, 128), 8)
    layer = pack.empty_layer(Form(U8, 50, 128))
    wide = [np.repeat(each.astype(np.float32), HALF, axis=1) for each in (affine.scale, affine.offset)]
    pack.put_values(layer, 0, wide[0] * affine.codes + wide[1])
    assert layer.weights.tobytes() == affine.packed.weights.tobytes()


@both_bits
@pytest.mark.parametrize("small", [False, True])
def test_a_group_of_whole_multiples_of_one_float16_loses_nothing(bits, small):
    """As those of AWQ, GPTQ and 8-bit integers are, whose groups are longer; small: an eighth is no float16."""
    rng = np.random.default_rng(1)
    scale = (rng.uniform(1, 2, (96, 4)) * (2.0**-13 if small else 0.01)).astype(np.float16)
    zeros = rng.integers(0, 16, (96, 4)) if bits == 4 else np.full((96, 4), 128)
    scale, zeros = (np.repeat(each, 2, axis=1) for each in (scale, zeros))
    codes = np.maximum(random_codes((96, 256), bits), bits == 8)
    offset = -scale.astype(np.float32) * zeros
    packed = pack_affine(codes, scale, offset, bits)
    exact = (codes - np.repeat(zeros, HALF, axis=1)) * np.repeat(scale.astype(np.float64), HALF, axis=1)
    np.testing.assert_array_equal(unpack(packed), exact)
    held, _ = integer_weights(packed)
    assert held.min() >= 1
    assert held.max() <= 255


def test_a_group_with_the_code_that_no_kernel_takes_is_rounded_and_its_neighbours_are_not():
    codes = np.full((48, 128), 200, np.uint8)
    codes[:, 5] = 0
    scale = np.full((48, 4), 0.01, np.float16)
    packed = pack_affine(codes, scale, -128 * scale.astype(np.float32), 8)
    exact = (codes - 128.0) * float(np.float16(0.01))
    np.testing.assert_array_equal(unpack(packed)[:, 64:], exact[:, 64:])
    assert 0 < np.abs(unpack(packed) - exact).max() < 0.02
    assert integer_weights(packed)[0].min() >= 1


@pytest.mark.parametrize(("columns", "expected"), [(1, 48), (48, 48), (49, 96), (96, 96)])
def test_columns_are_rounded_up_to_whole_tiles(columns, expected):
    assert padded(columns) == expected


@njit
def widen(bits, target):
    for i in range(bits.size):
        target[i] = half(bits[i])


def test_half_is_exact_for_every_finite_bit_pattern():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    got = np.empty(halves.size, np.float32)
    widen(halves.view(np.uint16).astype(np.int64), got)
    np.testing.assert_array_equal(got.view(np.uint32), halves.astype(np.float32).view(np.uint32))
