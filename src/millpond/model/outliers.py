"""Which input channels of each affine layer are taken out of the 8-bit groups (matmul.py says why).

A model has them in the same few places whatever it reads, so one pass over a fixed row of tokens finds them.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.matmul import GROUP, MAGNITUDES, OUTLIER_COUNT, OUTLIERS
from millpond.kernels.pack import Packed

MOST_OUTLIERS = 8
# A further channel is taken out while that lowers the layer's predicted rounding error (its variance) by this share.
LEAST_GAIN = 0.03
PROBE_TOKENS = 64


def probe_tokens(vocab_size: int) -> list[int]:
    """The fixed row of tokens: a walk over the vocabulary that needs no tokenizer."""
    return [(7919 * i + 104729) % vocab_size for i in range(PROBE_TOKENS)]


def find_outliers(
    descriptors: Sequence[tuple[Packed, NDArray[np.int64]]], probe: Callable[[], None]
) -> list[NDArray[np.int64]]:
    """Fill in the outlier fields of the descriptors (rows of int64, changed in place) from what `probe` runs through.

    Returns the arrays that the descriptors point to, which must outlive them.
    """
    affine = [(layer, row) for layer, row in descriptors if layer.scales is not None]
    magnitudes = [np.zeros(layer.depth, np.float32) for layer, _ in affine]
    for (_, row), sums in zip(affine, magnitudes, strict=True):
        row[MAGNITUDES] = sums.ctypes.data
    if affine:
        probe()
    kept = []
    for (layer, row), sums in zip(affine, magnitudes, strict=True):
        channels = choose_channels(sums, _group_weights(layer))
        row[MAGNITUDES], row[OUTLIER_COUNT], row[OUTLIERS] = 0, len(channels), channels.ctypes.data
        kept.append(channels)
    return kept


def choose_channels(magnitudes: NDArray[np.float32], group_weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """The channels to take out, one by one from the group with the largest predicted error.

    A group's rounding error has the variance max(x)**2 / (12 * 127**2) for each of its inputs, times the squares of its
    weights: only the ratio between groups matters here. magnitudes: float32 [K]; group_weights: float32 [K / 32].
    """
    groups = magnitudes.astype(np.float64).reshape(-1, GROUP)
    order = np.argsort(-groups, axis=1, kind="stable")
    errors = np.take_along_axis(groups, order, axis=1) ** 2 * group_weights[:, None]  # after taking out 0, 1, 2, ...
    total = float(errors[:, 0].sum())
    if not np.isfinite(total):
        return np.empty(0, np.int64)
    taken, steps = np.zeros(len(groups), np.int64), np.arange(1, MOST_OUTLIERS + 1)
    gains = (errors[:, :1] - errors[:, 1 : MOST_OUTLIERS + 1]) / steps  # for each channel, taking 1, 2, ... of a group
    while (room := MOST_OUTLIERS - int(taken.sum())) > 0:
        group, more = np.unravel_index(gains[:, :room].argmax(), (len(groups), room))
        gain, count = float(gains[group, more]), int(more) + 1
        if gain <= 0 or gain < LEAST_GAIN * total:
            break
        total -= gain * count
        taken[group] += count
        rest = errors[group, taken[group] : taken[group] + MOST_OUTLIERS + 1]
        gains[group] = (rest[0] - rest[1:]) / steps
    return np.concatenate([group * GROUP + order[group, :gone] for group, gone in enumerate(taken)]).astype(np.int64)


def _group_weights(layer: Packed) -> NDArray[np.float32]:
    """For each group of inputs the sum of its squared scales over the columns, to which its squared weights are in
    proportion."""
    assert layer.scales is not None
    scales = layer.scales.view(np.float16)[:, :, 0].astype(np.float32)  # [tiles, groups, 48]
    return (scales**2).sum(axis=(0, 2))
