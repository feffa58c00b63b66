"""The reference that the kernels are held to, against arithmetic that is exact."""

from fractions import Fraction

import numpy as np

from kernels.slow_linear import fma


def rounded(value: Fraction) -> np.float32:
    """The float32 next to an exact value, the even one of two (normal numbers only)."""
    if value == 0:
        return np.float32(0)
    power = 0
    while abs(value) >= 1 << 24:
        value, power = value / 2, power + 1
    while abs(value) < 1 << 23:
        value, power = value * 2, power - 1
    return np.float32(float(round(value)) * 2.0**power)


def test_a_product_and_a_sum_are_rounded_once():
    rng, tie = np.random.default_rng(0), np.float32(1 + 2.0**-12)  # its square is a tie but for what is added
    x, y = rng.standard_normal((2, 500)).astype(np.float32)
    z = (rng.standard_normal(500) * np.exp2(rng.integers(-60, 60, 500))).astype(np.float32)
    x[:8], y[:8], z[:8] = tie, tie, np.float32([1, -1, 1, -1, 0, 1, -1, 0]) * np.exp2(np.arange(-60, -52, dtype=float))
    exact = [Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True)]
    np.testing.assert_array_equal(fma(x, y, z), [rounded(each) for each in exact])
    np.testing.assert_array_equal(fma(-x, y, -z), [-rounded(each) for each in exact])
