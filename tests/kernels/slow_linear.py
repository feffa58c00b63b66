"""A linear layer of integer weights as matmul.py draws it, slow and plain: numpy's integers, and float32 sums in the
order in which a tile takes them, so that a fast kernel has to give the very same bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.pack import Packed

LARGEST = 127  # of an activation's code


def integer_weights(packed: Packed) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Codes [columns, depth] and scales [columns, groups] of whole tiles, read input by input out of the drawing."""
    groups = packed.weights
    codes = np.zeros((len(groups), 48, packed.depth), np.int64)
    for k in range(packed.depth):
        inputs, inside = groups[:, k // 64], k % 64
        if "codes" in groups.dtype.names:
            codes[:, :, k] = inputs["codes"][:, inside // 4] >> 8 * (inside % 4) & 0xFF
        else:
            byte, half = inside % 4 ^ 1, inside // 32  # each pair is swapped
            nibble = inputs["nibbles"][:, inside // 8] >> 8 * byte + 4 * (inside // 4 % 2) & 0xF
            step, base = inputs["steps"][:, half].astype(np.int64), inputs["bases"][:, half].astype(np.int64)
            codes[:, :, k] = base + (step * nibble >> 8)
    scales = groups["scales"].transpose(0, 2, 1).astype(np.float32)
    return codes.reshape(-1, packed.depth), scales.reshape(codes.shape[0] * 48, -1)


def quantised(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Codes [rows, depth] and scales [rows, groups] of the rows' groups of 64; every group has a largest magnitude."""
    groups = x.reshape(len(x), -1, 64)
    peak = np.abs(groups).max(axis=2, keepdims=True)
    codes = np.rint(groups * (np.float32(LARGEST) / peak)).astype(np.int64)
    return codes.reshape(x.shape), (peak * np.float32(1 / LARGEST))[..., 0]


def linear(
    packed: Packed,
    x: NDArray[np.float32],
    channels: Sequence[int] = (),
    exact: NDArray[np.float32] | None = None,
    start: float | None = None,
) -> NDArray[np.float32]:
    """x @ W.T, float32 [rows, columns of whole tiles]; on top of `start` where there is one.

    channels: the outlier channels, whose weights are exact, float32 [columns of whole tiles, channels].
    """
    inside = x.copy()
    inside[:, list(channels)] = 0
    (codes, scales), (a, s) = integer_weights(packed), quantised(inside)
    total = np.zeros((len(x), len(codes)), np.float32)
    for g in range(packed.depth // 64):
        group = slice(64 * g, 64 * g + 64)
        dots = a[:, group] @ (codes[:, group] - 128).T
        total = fma(dots.astype(np.float32) * s[:, g, None], scales[None, :, g], total)
    if start is not None:
        total = np.float32(start) + total
    for o, channel in enumerate(channels):
        total = fma(x[:, channel, None], exact[None, :, o], total)
    return total


def fma(x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]) -> NDArray[np.float32]:
    """x * y + z, rounded once. float64 holds the product; where it does not hold the sum, its last bit is made odd, so
    that rounding once more, to float32, cannot take it for a tie."""
    product, addend = np.broadcast_arrays(x.astype(np.float64) * y, z.astype(np.float64))
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    cut = (error != 0) & (bits % 2 == 0)
    bits[cut] += np.where((error > 0) == (total > 0), 1, -1)[cut]
    return total.astype(np.float32)
