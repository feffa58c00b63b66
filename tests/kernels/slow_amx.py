"""What AMX makes of a linear layer, slow and plain: the products' sums in the order in which AMX takes them, and to the
bit the bfloat16 weights that an integer tile stands for there."""

import numpy as np

from millpond.kernels.amx import ROUND_UP, STEP
from millpond.kernels.matmul import GROUP, HALF, U4, U8
from millpond.kernels.pack import padded, round_to_bf16


def linear(packed, weights, rows) -> np.ndarray:
    """rows @ weights.T for the values that a layer meets its rows with: float32 [columns, depth], and [rows, depth].

    Of 32 inputs, in the order of their kind, the even ones are one chain of sums and the odd ones another; products of
    bfloat16 are float32 exactly.
    """
    total = np.zeros((len(rows), len(weights)), np.float32)
    for start in range(0, rows.shape[1], STEP):
        chains = np.zeros((2, *total.shape), np.float32)
        for place, k in enumerate(inputs_of(packed)[start : start + STEP]):
            chains[place % 2] += rows[:, k, None] * weights[None, :, k]
        total += chains[0] + chains[1]
    return total


def inputs_of(packed) -> np.ndarray:
    """A layer's inputs as they follow each other in a row."""
    inputs = np.arange(packed.depth)
    return inputs.reshape(-1, 2, 2).swapaxes(1, 2).ravel() if packed.kind in (U4, U8) else inputs


def bf16(values) -> np.ndarray:
    """To the nearest bfloat16, as float32."""
    return (round_to_bf16(np.asarray(values, np.float32)).astype(np.uint32) << 16).view(np.float32)


def exact_weights(packed) -> np.ndarray:
    """What the weights of an integer layer are before they are rounded: float64 [columns of whole tiles, depth]."""
    scales = scales_of(packed).astype(np.float64)
    if packed.kind == U8:
        codes = codes_of(packed) - 128.0
    else:
        nibbles, steps, bases = nibbles_of(packed)
        codes = steps / 256 * nibbles + bases - 128 - 0.5 * (steps % 256 > 0)
    return in_columns(packed, codes.reshape(*scales.shape[:-1], GROUP) * scales)


def weights_met(packed) -> np.ndarray:
    """The weights of an integer layer as they are met: float32 [columns of whole tiles, depth]. numpy's float16 is
    rounded once, and float64 holds product and sum of a multiply-add."""
    power = packed.power()
    scales = (scales_of(packed).astype(np.float32) * np.float32(ROUND_UP * 2.0 ** (16 - power))).astype(np.float16)
    if packed.kind == U8:
        weights = scales * (codes_of(packed) - 128.0).astype(np.float16)
    else:
        nibbles, steps, bases = nibbles_of(packed)
        each = scales[..., None] * (steps.astype(np.float16) * np.float16(1 / 256))
        start = scales[..., None] * (bases - 128 - 0.5 * (steps % 256 > 0)).astype(np.float16)
        weights = (nibbles * each.astype(np.float64) + start).astype(np.float16)
    bits = weights.view(np.int16).astype(np.int32) >> 3 & 0x8FFF | 0x3000  # 3 of 10 bits of the mantissa are cut off
    met = (bits.astype(np.uint32) << 16).view(np.float32) * np.float32(2.0**power)
    return in_columns(packed, met)


def codes_of(packed) -> np.ndarray:
    """Of a U8 layer: [tiles, 48, groups, 64]."""
    return np.ascontiguousarray(packed.weights["codes"].transpose(0, 3, 1, 2)).view(np.uint8)


def nibbles_of(packed) -> list[np.ndarray]:
    """Nibbles [tiles, 48, groups, 2, 32] of a U4 layer, and their halves' steps and bases [tiles, 48, groups, 2, 1]."""
    raw = np.ascontiguousarray(packed.weights["nibbles"].transpose(0, 3, 1, 2)).view(np.uint8)
    raw = raw.reshape(*raw.shape[:-1], GROUP // 8, 2, 2)[..., ::-1].reshape(*raw.shape[:-1], GROUP // 8, 4)
    nibbles = np.concatenate([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-2], 2, HALF)
    halves = [packed.weights[name].transpose(0, 3, 1, 2)[..., None].astype(np.int64) for name in ("steps", "bases")]
    return [nibbles, *halves]


def scales_of(packed) -> np.ndarray:
    """float16 [tiles, 48, groups, 1]."""
    return packed.weights["scales"].transpose(0, 2, 1)[..., None]


def in_columns(packed, weights) -> np.ndarray:
    return weights.reshape(padded(packed.columns), packed.depth)
