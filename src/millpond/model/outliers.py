"""Which input channels of each integer layer are taken out of the 8-bit groups (matmul.py says why).

A model has them in the same few places whatever it reads, so one pass over a fixed row of tokens finds them.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.matmul import GROUP, KIND, MAGNITUDES, MOST_OUTLIERS, OUTLIER_COUNT, OUTLIERS, U8
from millpond.kernels.pack import Packed

# A further channel is taken out while that lowers the layer's predicted rounding error (its variance) by this share.
LEAST_GAIN = 0.03
PROBE_TOKENS = 64


def probe_tokens(vocab_size: int) -> list[int]:
    """The fixed row of tokens: a walk over the vocabulary that needs no tokenizer."""
    return [(7919 * i + 104729) % vocab_size for i in range(PROBE_TOKENS)]


def find_outliers(
    descriptors: Sequence[tuple[Packed, NDArray[np.int64]]], probe: Callable[[], None]
) -> list[NDArray[np.int64]]:
    """The channels of every integer layer, in order, from what `probe` runs through.

    The rows of the descriptors (int64) are changed while it runs.
    """
    integers = integer_layers(descriptors)
    magnitudes = [np.zeros(layer.depth, np.float32) for layer, _ in integers]
    for (_, row), sums in zip(integers, magnitudes, strict=True):
        row[MAGNITUDES] = sums.ctypes.data
    if integers:
        probe()
    for _, row in integers:
        row[MAGNITUDES] = 0
    pairs = zip(integers, magnitudes, strict=True)
    return [choose_channels(sums, _group_weights(layer)) for (layer, _), sums in pairs]


def take_out(descriptors: Sequence[tuple[Packed, NDArray[np.int64]]], outliers: Sequence[NDArray[np.int64]]) -> None:
    """Fill in the outlier fields of the descriptors of integer layers; the arrays of channels must outlive them."""
    for (_, row), channels in zip(integer_layers(descriptors), outliers, strict=True):
        row[OUTLIER_COUNT], row[OUTLIERS] = len(channels), channels.ctypes.data


def integer_layers(
    descriptors: Sequence[tuple[Packed, NDArray[np.int64]]],
) -> list[tuple[Packed, NDArray[np.int64]]]:
    """Those whose inputs become 8-bit groups; the others have no outliers."""
    return [(layer, row) for layer, row in descriptors if row[KIND] <= U8]


def choose_channels(magnitudes: NDArray[np.float32], group_weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """The channels to take out, one by one from the group with the largest predicted error.

    A group's rounding error has the variance max(x)**2 / (12 * 127**2) for each of its inputs, times the squares of its
    weights: only the ratio between groups matters here. magnitudes: float32 [K]; group_weights: float32 [K / 64].
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
    return (layer.weights["scales"].astype(np.float32) ** 2).sum(axis=(0, 2))  # of [tiles, groups, 48]
