"""Which input channels of each affine layer are taken out of the 8-bit groups (matmul.py says why).

A model has them in the same few places whatever it reads, so one pass over a fixed row of tokens finds them.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.matmul import GROUP, MAGNITUDES, OUTLIER_COUNT, OUTLIER_WEIGHTS, OUTLIERS
from millpond.kernels.pack import Packed, channel_weights

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
    """The channels of every affine layer, in order, from what `probe` runs through.

    The rows of the descriptors (int64) are changed while it runs.
    """
    affine = affine_layers(descriptors)
    magnitudes = [np.zeros(layer.depth, np.float32) for layer, _ in affine]
    for (_, row), sums in zip(affine, magnitudes, strict=True):
        row[MAGNITUDES] = sums.ctypes.data
    if affine:
        probe()
    for _, row in affine:
        row[MAGNITUDES] = 0
    pairs = zip(affine, magnitudes, strict=True)
    return [choose_channels(sums, _group_weights(layer)) for (layer, _), sums in pairs]


def take_out(
    descriptors: Sequence[tuple[Packed, NDArray[np.int64]]], outliers: Sequence[NDArray[np.int64]]
) -> list[NDArray[np.float32]]:
    """Fill in the outlier fields of the descriptors of affine layers.

    Returns the channels' weights, which stand beside the packed ones: read out of a tile they would hold up the stream
    of tiles. They and the arrays of channels must outlive the descriptors.
    """
    kept = []
    for (layer, row), channels in zip(affine_layers(descriptors), outliers, strict=True):
        weights = channel_weights(layer, channels)
        row[OUTLIER_COUNT], row[OUTLIERS], row[OUTLIER_WEIGHTS] = (
            len(channels),
            channels.ctypes.data,
            weights.ctypes.data,
        )
        kept.append(weights)
    return kept


def affine_layers(
    descriptors: Sequence[tuple[Packed, NDArray[np.int64]]],
) -> list[tuple[Packed, NDArray[np.int64]]]:
    """Those that have scales; the others are not quantised and have no outliers."""
    return [(layer, row) for layer, row in descriptors if layer.scales is not None]


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
