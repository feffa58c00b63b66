"""The primitives that every tile is made of, each on whole arrays against numpy."""

from types import SimpleNamespace

import numpy as np
import pytest
from numba import njit

from kernels.emit import NARROW_ISAS, RUNNABLE_ISAS, counted_from, lanes
from millpond.kernels.isa import ISAS
from millpond.kernels.simd import V16F32, V16I16, V16I32, V32I16, Ir, address

LARGEST_EXP_ERROR = 2.24  # units in the last place

every_isa = pytest.mark.parametrize("isa", RUNNABLE_ISAS)


class Builder:
    """As much of a builder as an Ir needs that emits nothing."""

    function = SimpleNamespace(attributes=set())


def bits_of(values) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def bf16_to_float(bits) -> np.ndarray:
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


@pytest.fixture(scope="module")
def exp():
    compiled = lanes(lambda ir, x: ir.exp(x), [V16F32], V16F32)
    return lambda x: compiled(np.asarray(x, np.float32)).view(np.float32).ravel()


@pytest.fixture(scope="module")
def exp2():
    compiled = lanes(lambda ir, x: ir.exp2(x), [V16F32], V16F32)
    return lambda x: compiled(np.asarray(x, np.float32)).view(np.float32).ravel()


@pytest.fixture(scope="module")
def to_bf16():
    compiled = lanes(lambda ir, x: ir.to_bf16(x), [V16F32], V16I16)
    return lambda x: compiled(np.asarray(x, np.float32)).view(np.uint16).ravel()


def test_exp_is_within_about_two_units_in_the_last_place(exp):
    x = np.linspace(-87, 88, 1 << 20, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    unit = np.spacing(np.maximum(exact, np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
    assert (np.abs(exp(x) - exact) / unit).max() <= LARGEST_EXP_ERROR


def test_exp2_is_within_about_two_units_in_the_last_place(exp2):
    x = np.linspace(-125, 127, 1 << 20, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert (np.abs(exp2(x) - exact) / np.spacing(exact.astype(np.float32))).max() <= LARGEST_EXP_ERROR
    np.testing.assert_array_equal(exp2(np.arange(-125, 127)[:240]), 2.0 ** np.arange(-125, 127)[:240])


def test_exp_of_zero_is_exactly_one(exp):
    np.testing.assert_array_equal(exp([0.0] * 8 + [-0.0] * 8), 1.0)


def test_exp2_below_its_range_is_a_vanishing_number_and_of_no_number_none(exp2):
    far = exp2([-126.5, -1000, -3.4e38, -np.inf] * 4)
    assert ((far >= 0) & (far <= 2.0**-125)).all()
    np.testing.assert_array_equal(np.isnan(exp2([np.nan, 0.0] * 8)), [True, False] * 8)


def test_exp_below_its_range_is_a_vanishing_number_and_not_garbage(exp):
    far = exp([-87.5, -88, -100, -104, -1000, -1e30, -3.4e38, -np.inf] * 2)
    assert (far >= 0).all()
    assert (far <= 2e-38).all()


def test_exp_of_what_is_not_a_number_is_not_a_number_in_its_own_lane_only(exp):
    x = np.zeros(16, np.float32)
    x[[3, 11]] = np.nan
    assert np.isnan(exp(x)).nonzero()[0].tolist() == [3, 11]


@every_isa
def test_half_to_float_is_exact_for_every_finite_bit_pattern(isa):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    got = lanes(lambda ir, x: ir.half_to_float(x), [V16I16], V16F32, isa)(patterns).view(np.uint32).ravel()
    halves = patterns.view(np.float16)
    finite = np.isfinite(halves)
    np.testing.assert_array_equal(got[finite], bits_of(halves.astype(np.float32))[finite])


def test_to_bf16_rounds_to_the_nearest_and_ties_to_even(to_bf16):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[: 1 << 14] = (bits[: 1 << 14] & 0xFFFF0000) | 0x8000  # exactly between two neighbours
    x = bits.view(np.float32)
    x = x[np.isfinite(x)][: 1 << 15]
    below, exact = bits_of(x) >> 16, x.astype(np.float64)
    above = below + 1
    beyond = bf16_to_float(above).astype(np.float64)
    beyond = np.where(np.isinf(beyond), np.copysign(2.0**128, exact), beyond)  # infinity is where 2**128 would be
    to_below, to_above = np.abs(exact - bf16_to_float(below)), np.abs(exact - beyond)
    is_tie = to_below == to_above
    assert is_tie.sum() > 1000
    nearest = np.where(is_tie, below + below % 2, np.where(to_below < to_above, below, above))
    np.testing.assert_array_equal(to_bf16(x), nearest.astype(np.uint16))


def test_to_bf16_keeps_infinity_and_what_is_not_a_number(to_bf16):
    values = np.array([np.inf, -np.inf, np.nan, -np.nan] * 4, np.float32)
    np.testing.assert_array_equal(bf16_to_float(to_bf16(values)), values)


@every_isa
def test_dot_u8s8_is_exact_at_the_extremes_and_between(isa):
    rng = np.random.default_rng(1)
    weights = rng.integers(1, 256, (64, 64), dtype=np.uint8)
    activations = rng.integers(-127, 128, (64, 64), dtype=np.int8)
    weights[:3], weights[3:6] = 255, 1
    activations[[0, 3]], activations[[1, 4]], activations[[2, 5]] = -127, 127, 0
    start = rng.integers(-(1 << 20), 1 << 20, (64, 16), dtype=np.int32)
    got = lanes(lambda ir, acc, w, a: ir.dot_u8s8(acc, w, a), [V16I32, V16I32, V16I32], V16I32, isa)(
        start, weights, activations
    ).view(np.int32)
    products = ((weights.astype(np.int32) - counted_from(isa)) * activations).reshape(64, 16, 4)
    np.testing.assert_array_equal(got, start + products.sum(axis=2))
    assert (got - start).max() == 4 * 127 * (255 - counted_from(isa))


@every_isa
def test_a_chain_of_dots_from_its_start_sums_weights_less_128(isa):
    rng = np.random.default_rng(5)
    weights, activations = (
        rng.integers(1, 256, (64, 64), dtype=np.uint8),
        rng.integers(-127, 128, (64, 64), dtype=np.int8),
    )
    correction = -128 * activations.astype(np.int32).reshape(64, 16, 4).sum(axis=2, dtype=np.int32)

    def chain(ir, correction, w, a):
        return ir.dot_u8s8(ir.dot_start(correction), w, a)

    got = lanes(chain, [V16I32, V16I32, V16I32], V16I32, isa)(correction, weights, activations).view(np.int32)
    products = ((weights.astype(np.int32) - 128) * activations).reshape(64, 16, 4)
    np.testing.assert_array_equal(got, products.sum(axis=2))


@every_isa
def test_the_high_product_is_the_upper_half_of_unsigned_products(isa):
    x, y = np.random.default_rng(6).integers(0, 1 << 16, (2, 64, 32), dtype=np.uint16)
    x[0], y[0], y[1] = 0xFFFF, 0xFFFF, 0
    got = lanes(lambda ir, x, y: ir.high_product(x, y), [V32I16, V32I16], V32I16, isa)(x, y).view(np.uint16)
    np.testing.assert_array_equal(got, x.astype(np.uint32) * y >> 16)


@pytest.mark.parametrize("isa", NARROW_ISAS)
def test_kernels_of_256_bits_use_nothing_wider(isa):
    dots = lanes(lambda ir, acc, w, a: ir.dot_u8s8(acc, w, a), [V16I32, V16I32, V16I32], V16I32, isa)
    x = np.ones((4, 16), np.int32)
    dots(x, x, x)
    assert "ymm" in dots.assembly()
    assert "zmm" not in dots.assembly()
    assert ("vpdpbusd" if isa == "vnni256" else "vpmaddwd") in dots.assembly()


def test_more_of_a_tile_goes_together_where_it_fits_into_the_registers():
    together = {isa: [Ir(Builder(), level).together(count, 3) for count in (3, 4, 5, 6)] for isa, level in ISAS.items()}
    assert together["avx512"] == together["portable"] == [3, 4, 5, 6]
    assert together["avx2"] == together["vnni256"] == [3, 2, 1, 3]


@every_isa
def test_dot_bf16_is_close_to_exact(isa):
    rng = np.random.default_rng(2)
    x, y = (rng.integers(0x3C00, 0x4200, (256, 16, 2)).astype(np.uint16) for _ in range(2))
    x |= (rng.integers(0, 2, x.shape) << 15).astype(np.uint16)
    start = rng.standard_normal((256, 16)).astype(np.float32)
    got = lanes(lambda ir, acc, x, y: ir.dot_bf16(acc, x, y), [V16F32, V16I32, V16I32], V16F32, isa)(start, x, y).view(
        np.float32
    )
    products = bf16_to_float(x).astype(np.float64) * bf16_to_float(y)
    magnitude = np.abs(products).sum(axis=2) + np.abs(start)
    assert (np.abs(got - (start + products.sum(axis=2))) / magnitude).max() < 2.0**-22


def test_select_max_takes_the_other_side_of_what_is_not_a_number(exp):
    x, y = np.array([1, 2, -1, np.nan] * 4, np.float32), np.array([2, 1, -2, 5] * 4, np.float32)
    got = lanes(lambda ir, x, y: ir.select_max(x, y), [V16F32, V16F32], V16F32)(x, y).view(np.float32)
    np.testing.assert_array_equal(got.ravel(), [2, 2, -1, 5] * 4)


def test_reduce_adds_by_one_fixed_tree():
    x = np.random.default_rng(3).standard_normal((64, 16)).astype(np.float32) * np.float32(1e3)
    got = lanes(lambda ir, x: ir.splat(ir.reduce(ir.b.fadd, x)), [V16F32], V16F32)(x).view(np.float32)
    tree = x
    for half in (8, 4, 2, 1):
        tree = tree[:, :half] + tree[:, half : 2 * half]
    np.testing.assert_array_equal(got, np.repeat(tree, 16, axis=1))


def test_bf16_pair_takes_the_even_and_the_odd_ones_apart():
    pairs = np.random.default_rng(4).integers(0, 0x7F80, (8, 16, 2)).astype(np.uint16)
    for part in (0, 1):
        got = lanes(lambda ir, x, part=part: ir.bf16_pair(x)[part], [V16I32], V16F32)(pairs).view(np.float32)
        np.testing.assert_array_equal(got, bf16_to_float(pairs[..., part]))


def test_the_address_of_an_element_is_where_numpy_has_it():
    array = np.zeros((4, 5, 6), np.float32)[::2, 1:]
    where = njit(lambda a, i, j: (address(a), address(a, i), address(a, i, j), address(a, i, j, 3)))
    views = (array, array[1:], array[1, 2:], array[1, 2, 3:])
    assert where(array, 1, 2) == tuple(view.ctypes.data for view in views)


@pytest.mark.parametrize(("places", "refused"), [((0, 0, 0), "more places than axes"), ((0.5,), "is an integer")])
def test_places_that_an_array_does_not_have_are_refused_as_it_is_compiled(places, refused):
    with pytest.raises(Exception, match=refused):
        njit(lambda a, where: address(a, *where))(np.zeros((2, 2)), places)
