"""A token's row of the embedding, read out of the tiles that the head uses, so that tied weights are held once."""

import numpy as np
from numba import njit

from millpond.kernels.matmul import BF16, COLUMNS, DEPTH, GROUP, KIND, SCALE_BYTES, SCALES, U4, U8, WEIGHTS
from millpond.kernels.simd import byte_at, float_at, float_from_bits, short_at


@njit(cache=True, nogil=True)
def half(bits):
    """float16 bits as float32, exactly: shifted into a float32's place, times the difference of the biases, 2**112."""
    magnitude = float_from_bits(np.int32((bits & 0x7FFF) << 13)) * np.float32(2.0**112)
    return -magnitude if bits & 0x8000 else magnitude


@njit(cache=True, nogil=True)
def embed(layer, token, target):
    """target[:depth] = row `token` of the matrix that the descriptor `layer` stands for; float32."""
    kind, depth = layer[KIND], layer[DEPTH]
    tile, column = token // COLUMNS, token % COLUMNS
    if kind <= U8:
        _embed_affine(kind, depth, tile, column, layer[WEIGHTS], layer[SCALES], target)
    elif kind == BF16:
        w = layer[WEIGHTS] + tile * depth * 96 + column * 4
        for k in range(depth):
            target[k] = float_from_bits(np.int32(short_at(w + (k // 2) * 192 + (k % 2) * 2) << 16))
    else:
        w = layer[WEIGHTS] + tile * depth * 192 + column * 4
        for k in range(depth):
            target[k] = float_at(w + k * 192)


@njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _embed_affine(kind, depth, tile, column, weights, scales, target):
    s = scales + tile * (depth // GROUP) * SCALE_BYTES + column * 2
    w = weights + tile * depth * (24 if kind == U4 else 48) + column * 4
    for g in range(depth // GROUP):
        scale = half(short_at(s + g * SCALE_BYTES))
        offset = half(short_at(s + g * SCALE_BYTES + 2 * COLUMNS))
        for k in range(g * GROUP, (g + 1) * GROUP):
            if kind == U4:
                code = (byte_at(w + (k // 8) * 192 + k % 4) >> (k // 4 % 2 * 4)) & 15
            else:
                code = byte_at(w + (k // 4) * 192 + k % 4)
            target[k] = scale * np.float32(code) + offset
