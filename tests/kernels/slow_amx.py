"""What amx.py computes, slowly, to the bit: the products' sums in the order in which AMX takes them, and the bfloat16
weights that an integer tile stands for there."""

import numpy as np

from millpond.kernels.amx import ROUND_UP, STEP
from millpond.kernels.matmul import GROUP, HALF, STEP_BITS, U4, ZERO_CODE
from millpond.kernels.pack import padded, round_to_bf16


def linear(weights, rows) -> np.ndarray:
    """rows @ weights.T for bfloat16 values: float32 [columns, depth] and [rows, depth].

    Of 32 inputs the even ones are one chain of sums and the odd ones another; products of bfloat16 are float32 exactly.
    """
    total = np.zeros((len(rows), len(weights)), np.float32)
    for start in range(0, rows.shape[1], STEP):
        chains = np.zeros((2, *total.shape), np.float32)
        for k in range(start, start + STEP):
            chains[k % 2] += rows[:, k, None] * weights[None, :, k]
        total += chains[0] + chains[1]
    return total


def bf16(values) -> np.ndarray:
    """To the nearest bfloat16, as float32."""
    return (round_to_bf16(np.asarray(values, np.float32)).astype(np.uint32) << 16).view(np.float32)


def exact_weights(packed) -> np.ndarray:
    """What the weights of an integer layer are before they are rounded: float64 [columns of whole tiles, depth]."""
    tiles = packed.weights
    if packed.kind != U4:
        codes = np.ascontiguousarray(tiles["codes"].transpose(0, 3, 1, 2)).view(np.uint8).astype(np.float64)
    else:
        raw = np.ascontiguousarray(tiles["nibbles"].transpose(0, 3, 1, 2)).view(np.uint8)
        raw = raw.reshape(*raw.shape[:-1], GROUP // 8, 2, 2)[..., ::-1].reshape(*raw.shape[:-1], GROUP // 8, 4)
        nibbles = np.concatenate([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-2], 2, HALF)
        steps, bases = (tiles[name].transpose(0, 3, 1, 2)[..., None].astype(np.float64) for name in ("steps", "bases"))
        one = 1 << STEP_BITS
        codes = (bases - 0.5 * (steps % one > 0) + steps / one * nibbles).reshape(*raw.shape[:-2], GROUP)
    scales = tiles["scales"].transpose(0, 2, 1)[..., None].astype(np.float64)
    return (scales * (codes - ZERO_CODE)).reshape(padded(packed.columns), packed.depth)


def is_rounded(weights, exact) -> np.ndarray:
    """Where a weight is a bfloat16 that `exact` may become: what is cut off of a little more than it, but for the last
    bits of a float32 (an offset of 2 ** 11 steps is taken off on the way)."""
    slack = np.abs(exact).max() * 2.0**-12
    largest = np.abs(exact) * ROUND_UP + slack
    size = np.abs(weights)
    near = (size <= largest) & (largest - 2 * slack < size * (1 + 2.0**-7))
    return near & ((np.abs(exact) <= slack) | (weights * exact > 0)) | (size <= slack) & (np.abs(exact) <= slack)
