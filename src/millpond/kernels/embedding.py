"""A token's row of the embedding, read out of the tiles that the head uses, so that tied weights are held once."""

import numpy as np

from millpond.kernels.jit import compiled, inner, merged
from millpond.kernels.matmul import (
    BASES_AT,
    BF16,
    COLUMNS,
    DEPTH,
    GROUP,
    HALF,
    KIND,
    STEP_BITS,
    STEPS_AT,
    U4,
    U4_SCALES_AT,
    U8,
    U8_SCALES_AT,
    WEIGHTS,
    ZERO_CODE,
    group_bytes,
)
from millpond.kernels.simd import byte_at, float_at, float_from_bits, short_at


@inner
def half(bits):
    """float16 bits as float32, exactly: shifted into a float32's place, times the difference of the biases, 2**112."""
    magnitude = float_from_bits(np.int32((bits & 0x7FFF) << 13)) * np.float32(2.0**112)
    return -magnitude if bits & 0x8000 else magnitude


@compiled
def embed(layer, token, target):
    """target[:depth] = row `token` of the matrix that the descriptor `layer` stands for; float32."""
    kind, depth = layer[KIND], layer[DEPTH]
    tile, column = token // COLUMNS, token % COLUMNS
    if kind <= U8:
        _embed_integers(kind, depth, tile, column, layer[WEIGHTS], target)
    elif kind == BF16:
        w = layer[WEIGHTS] + tile * depth * 96 + column * 4
        for k in range(depth):
            target[k] = float_from_bits(np.int32(short_at(w + (k // 2) * 192 + (k % 2) * 2) << 16))
    else:
        w = layer[WEIGHTS] + tile * depth * 192 + column * 4
        for k in range(depth):
            target[k] = float_at(w + k * 192)


@merged
def _embed_integers(kind, depth, tile, column, weights, target):
    for g in range(depth // GROUP):
        w = weights + (tile * (depth // GROUP) + g) * group_bytes(kind)
        scale = half(short_at(w + (U4_SCALES_AT if kind == U4 else U8_SCALES_AT) + column * 2))
        for k in range(GROUP):
            code = _code_of_nibble(w, column, k) if kind == U4 else byte_at(w + (k // 4 * COLUMNS + column) * 4 + k % 4)
            target[g * GROUP + k] = scale * np.float32(code - ZERO_CODE)


@merged
def _code_of_nibble(w, column, k):
    """The code of input k of a group of a U4 tile at address w."""
    nibble = byte_at(w + (k // 8 * COLUMNS + column) * 4 + (k % 4 ^ 1)) >> (k // 4 % 2 * 4) & 15
    place = k // HALF * COLUMNS + column
    return byte_at(w + BASES_AT + place) + (short_at(w + STEPS_AT + place * 2) * nibble >> STEP_BITS)
