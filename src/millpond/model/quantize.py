"""Float weights to 4 bits in groups of 32, at load (8 bits are put_values of kernels/pack.py)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.load.affine import GROUP, AffineWeights

TOP = np.float32(15)
# The ends of a group's grid, as shares of the way from its mean to its least and largest weight, that are tried.
SHRINKS = (1.0, 0.85)
REFITS = 2


def quantize_4_bit(weights: NDArray[np.float32]) -> AffineWeights:
    """The codes, scales and offsets with small squared errors: float32 [N, K], K a multiple of 32.

    Each grid of SHRINKS is fitted anew to the codes that it gives, by least squares, and the best one is kept.
    """
    columns, depth = weights.shape
    groups = weights.reshape(-1, GROUP)
    least, most = groups.min(axis=1), groups.max(axis=1)
    middle = groups.mean(axis=1)
    best = _fit(groups, least, most)
    for shrink in SHRINKS[1:]:
        tried = _fit(groups, middle + shrink * (least - middle), middle + shrink * (most - middle))
        better = tried[3] < best[3]
        for kept, new in zip(best, tried, strict=True):
            kept[better] = new[better]
    codes, scale, offset, _ = best
    shape = columns, depth // GROUP
    return AffineWeights(codes.reshape(weights.shape), scale.reshape(shape), offset.reshape(shape), 4)


Fit = tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


def _fit(groups: NDArray[np.float32], first: NDArray[np.float32], last: NDArray[np.float32]) -> Fit:
    """Codes, scale, offset and squared error of each group, from a grid between two ends."""
    scale, offset = (last - first) / TOP, first
    codes = _codes(groups, scale, offset)
    for _ in range(REFITS):
        scale, offset = _least_squares(groups, codes, scale, offset)
        codes = _codes(groups, scale, offset)
    errors = ((scale[:, None] * codes + offset[:, None] - groups) ** 2).sum(axis=1)
    return codes.astype(np.uint8), scale, offset, errors


def _codes(groups: NDArray[np.float32], scale: NDArray[np.float32], offset: NDArray[np.float32]) -> NDArray[np.float32]:
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > np.finfo(np.float32).tiny)
    return np.clip(np.rint((groups - offset[:, None]) * inverse[:, None]), 0, TOP)


def _least_squares(
    groups: NDArray[np.float32],
    codes: NDArray[np.float32],
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The scale and offset of the line through (code, weight); what was given where all codes are the same."""
    code_mean, mean = codes.mean(axis=1), groups.mean(axis=1)
    spread = ((codes - code_mean[:, None]) ** 2).sum(axis=1)
    along = ((codes - code_mean[:, None]) * (groups - mean[:, None])).sum(axis=1)
    slope = np.divide(along, spread, out=scale.copy(), where=(spread > 0) & (along > 0))
    return slope, np.where(spread > 0, mean - slope * code_mean, offset)
