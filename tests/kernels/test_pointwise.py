"""Norm, rotation and activation of one row against numpy in float64, also where numbers are large or missing."""

from math import erfc

import numpy as np
import pytest
from numba import njit

from millpond.kernels.pack import round_to_bf16
from millpond.kernels.pointwise import (
    add_row,
    add_scaled,
    cap_row,
    copy_row,
    geglu_row,
    gelu_row,
    layer_norm,
    rms_norm,
    rotate,
    round_row,
    scale_row,
    swiglu_row,
    to_bf16,
)

SILU_ERROR = 3e-7  # relative, the largest


@njit
def swiglu(gate, up, target, count):
    swiglu_row(gate, up, target, count)


@njit
def exact_gelu(x, target, count):
    gelu_row(x, target, count)


@njit
def copied(x, target, count):
    copy_row(x, target, count)


@njit
def rounded(x, target, count):
    round_row(x, target, count)


def swiglu_of(gate, up) -> np.ndarray:
    gate, up = (np.ascontiguousarray(each, np.float32) for each in (gate, up))
    target = np.full(gate.size, np.nan, np.float32)
    swiglu(gate.ctypes.data, up.ctypes.data, target.ctypes.data, gate.size // 16)
    return target


def random_row(size, seed=0, scale=1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e12])
@pytest.mark.parametrize("size", [32, 576, 8192])
def test_rms_norm_divides_by_the_root_of_the_mean_square(size, scale):
    x, gain, target = random_row(size, scale=scale), random_row(size, seed=1), np.empty(size, np.float32)
    rms_norm(x, gain, np.float32(1e-5), target)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean() + 1e-5) * gain
    np.testing.assert_allclose(target, expected, rtol=2e-6)


def test_rms_norm_of_zeros_is_zeros():
    target = np.empty(32, np.float32)
    rms_norm(np.zeros(32, np.float32), np.ones(32, np.float32), np.float32(1e-5), target)
    np.testing.assert_array_equal(target, 0)


def test_rms_norm_reads_as_many_numbers_as_there_are_gains():
    x, target = np.full(48, np.nan, np.float32), np.full(48, 7, np.float32)
    x[:32] = 3
    rms_norm(x, np.ones(32, np.float32), np.float32(0), target)
    np.testing.assert_allclose(target[:32], 1)
    np.testing.assert_array_equal(target[32:], 7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -3e38])
def test_rms_norm_of_what_is_not_finite_or_has_no_finite_square_is_not_a_number_somewhere(bad):
    """Zeros would go on as good numbers, and the model would answer token 0 for ever."""
    x, target = np.ones(32, np.float32), np.empty(32, np.float32)
    x[9] = bad
    rms_norm(x, np.ones(32, np.float32), np.float32(1e-5), target)
    assert np.isnan(target).any()


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e12])
@pytest.mark.parametrize("size", [32, 384, 8192])
def test_layer_norm_takes_the_mean_away_and_divides_by_the_deviation(size, scale):
    x, gain, bias = random_row(size, scale=scale) + np.float32(3 * scale), random_row(size, seed=1), random_row(size, 2)
    target = np.empty(size, np.float32)
    layer_norm(x, gain, bias, np.float32(1e-12), target)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-12) * gain + bias
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=3e-6)
    layer_norm(x, gain, bias, np.float32(1e-12), x)  # in place
    np.testing.assert_array_equal(x, target)


def test_layer_norm_of_a_row_that_is_the_same_everywhere_is_its_bias():
    target = np.empty(32, np.float32)
    layer_norm(np.full(32, 7, np.float32), np.ones(32, np.float32), random_row(32), np.float32(1e-12), target)
    np.testing.assert_array_equal(target, random_row(32))


def test_layer_norm_reads_as_many_numbers_as_there_are_gains():
    x, target = np.full(48, np.nan, np.float32), np.full(48, 7, np.float32)
    x[:32] = random_row(32)
    layer_norm(x, np.ones(32, np.float32), np.zeros(32, np.float32), np.float32(0), target)
    assert abs(target[:32].mean()) < 1e-6
    np.testing.assert_array_equal(target[32:], 7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -3e38])
def test_layer_norm_of_what_is_not_finite_or_has_no_finite_square_is_not_a_number_somewhere(bad):
    x, target = np.ones(32, np.float32), np.empty(32, np.float32)
    x[9] = bad
    layer_norm(x, np.ones(32, np.float32), np.zeros(32, np.float32), np.float32(1e-12), target)
    assert np.isnan(target).any()


def test_rotation_turns_each_pair_of_halves_by_its_angle():
    x, angles, target = random_row(64), np.linspace(0, 40, 32, dtype=np.float32), np.empty(64, np.float32)
    rotate(x, np.cos(angles), np.sin(angles), target)
    turned = (x[:32] + 1j * x[32:].astype(np.float64)) * np.exp(1j * angles.astype(np.float64))
    np.testing.assert_allclose(target, np.concatenate([turned.real, turned.imag]), atol=1e-6)


def test_rotation_at_position_zero_changes_no_bit():
    x, target = random_row(80), np.empty(80, np.float32)
    rotate(x, np.ones(40, np.float32), np.zeros(40, np.float32), target)
    np.testing.assert_array_equal(target, x)


def test_swiglu_is_the_gate_times_its_sigmoid_times_up():
    gate, up = random_row(1536, scale=4), random_row(1536, seed=1)
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(swiglu_of(gate, up), wide / (1 + np.exp(-wide)) * up, rtol=1e-6)


def test_silu_is_near_the_exact_one_wherever_it_is_more_than_next_to_nothing():
    gate = np.linspace(-86, 90, 1 << 18, dtype=np.float32)
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(swiglu_of(gate, np.ones(gate.size)), wide / (1 + np.exp(-wide)), rtol=SILU_ERROR)


def test_swiglu_far_from_zero_is_the_gate_itself_or_next_to_nothing():
    large = np.array([50, 88, 89, 100, 1e4, 1e30, 3e38, np.inf], np.float32)
    got = swiglu_of(np.concatenate([large, -large]), np.ones(16))
    np.testing.assert_allclose(got[:8], large, rtol=1e-6)
    assert (np.abs(got[8:14]) < 1e-7).all(), "a finite gate far below zero lets next to nothing through"


def test_swiglu_of_what_is_not_a_number_is_not_a_number_in_its_own_place_only():
    gate, up = np.ones(32, np.float32), np.ones(32, np.float32)
    gate[5] = up[20] = np.nan
    assert np.flatnonzero(np.isnan(swiglu_of(gate, up))).tolist() == [5, 20]


def test_a_row_is_copied_or_rounded_to_bfloat16():
    x = random_row(64)
    as_float, as_bf16 = np.zeros(64, np.float32), np.zeros(64, np.uint16)
    copied(x.ctypes.data, as_float.ctypes.data, 4)
    rounded(x.ctypes.data, as_bf16.ctypes.data, 4)
    np.testing.assert_array_equal(as_float, x)
    np.testing.assert_array_equal(as_bf16, round_to_bf16(x))


def test_one_number_is_rounded_to_bfloat16_as_a_row_is():
    bits = np.random.default_rng(3).integers(0, 1 << 32, 4096, dtype=np.uint32)
    bits[::2] = (bits[::2] & 0xFFFF0000) | 0x8000
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    np.testing.assert_array_equal([to_bf16(each) for each in x], round_to_bf16(x))


@njit
def geglu(gate, up, target, count):
    geglu_row(gate, up, target, count)


@njit
def capped(x, scale, cap, count):
    cap_row(x, scale, cap, count)


@njit
def added(x, factor, target, count):
    scale_row(target, factor, count)
    add_scaled(x, factor, target, count)
    add_row(x, target, count)


def test_gelu_is_its_tanh_form():
    gate = np.linspace(-40, 40, 4096, dtype=np.float32)
    up, target = random_row(gate.size), np.full(gate.size, np.nan, np.float32)
    geglu(gate.ctypes.data, up.ctypes.data, target.ctypes.data, gate.size // 16)
    wide = gate.astype(np.float64)
    expected = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) * up
    np.testing.assert_allclose(target, expected, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("activation", [swiglu, geglu], ids=["silu", "gelu"])
def test_what_is_infinite_passes_or_shows_and_what_is_not_a_number_stays_none(activation):
    gate, up, target = np.ones(16, np.float32), np.ones(16, np.float32), np.zeros(16, np.float32)
    gate[:4] = np.inf, -np.inf, np.nan, -3e38
    activation(gate.ctypes.data, up.ctypes.data, target.ctypes.data, 1)
    assert target[0] == np.inf
    assert not np.isfinite(target[[1, 2]]).any()
    assert np.isfinite(target[3:]).all()


def exact_gelu_of(x) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    target = np.full(x.size, np.nan, np.float32)
    exact_gelu(x.ctypes.data, target.ctypes.data, x.size // 16)
    return target


def test_exact_gelu_is_the_number_times_the_normal_distribution_up_to_it():
    x = np.linspace(-14, 14, 16 * 2000).astype(np.float32)
    expected = [value * 0.5 * erfc(-value / 2**0.5) for value in x.astype(np.float64)]
    np.testing.assert_allclose(exact_gelu_of(x), expected, atol=5e-7)
    np.testing.assert_allclose(
        exact_gelu_of(x[np.abs(x) < 1][:1024]), np.array(expected)[np.abs(x) < 1][:1024], atol=2e-7
    )


def test_exact_gelu_far_from_zero_is_the_number_itself_or_nothing_and_keeps_what_is_none():
    x = np.array([3e38, 1e20, 40, -40, -1e20, -3e38, 0, -0.0] + [1] * 8, np.float32)
    np.testing.assert_allclose(exact_gelu_of(x)[:8], [x[0], x[1], 40, 0, 0, 0, 0, 0], atol=1e-37)
    x[3] = np.nan
    np.testing.assert_array_equal(np.isnan(exact_gelu_of(x)), np.isnan(x))


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_a_cap_bends_numbers_towards_it_and_keeps_what_is_none(scale):
    x = np.concatenate([np.linspace(-500, 500, 4094), [np.inf, np.nan]]).astype(np.float32)
    got = x.copy()
    capped(got.ctypes.data, np.float32(scale), np.float32(30), x.size // 16)
    expected = 30 * np.tanh(scale * x[:-1].astype(np.float64) / 30)
    np.testing.assert_allclose(got[:-1], expected, rtol=0, atol=1e-5)
    assert np.isnan(got[-1])


def test_rows_are_scaled_and_added():
    x, target = random_row(64), random_row(64, seed=1)
    expected = target * 0.22 + 0.22 * x + x
    added(x.ctypes.data, np.float32(0.22), target.ctypes.data, 4)
    np.testing.assert_allclose(target, expected, rtol=1e-6, atol=1e-6)
