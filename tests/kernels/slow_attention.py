"""8-bit keys, values and queries as attention_int8.py draws them, slow and plain: codes and scales in numpy, read and
written byte by byte. The codes of a block and the room for its scales are one array here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.attention_int8 import code_bytes, query_bytes, scale_bytes
from millpond.kernels.pack import round_to_bf16

BLOCK = 16
DIMS = 16  # that share a key's or a query's scale
LARGEST = 126

Codes = NDArray[np.int64]
Scales = NDArray[np.float32]


def widened(bits: NDArray[np.uint16]) -> Scales:
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantised(groups: NDArray[np.float32], *, bf16: bool) -> tuple[Codes, Scales]:
    """Codes and scales of the groups along the last axis; bf16: scales that a block of keys has room for."""
    with np.errstate(invalid="ignore"):
        peak = np.abs(groups).max(axis=-1)
        scales = np.where(np.isfinite(peak), peak * np.float32(1 / LARGEST), np.float32(np.nan)).astype(np.float32)
    if bf16:
        scales = widened(round_to_bf16(scales))
    tells = scales >= np.float32(2.0**-126)
    inverse = np.float32(1) / np.where(tells, scales, np.float32(1))
    codes = np.where(tells[..., None], np.rint(groups * inverse[..., None]), 0)
    return codes.astype(np.int64), scales


def quantised_rows(x: NDArray[np.float32], *, bf16: bool) -> tuple[Codes, Scales]:
    """Keys or queries [..., head_dim]: codes [..., head_dim] and scales [..., head_dim / 16]."""
    codes, scales = quantised(x.reshape(*x.shape[:-1], -1, DIMS), bf16=bf16)
    return codes.reshape(x.shape), scales


def held_keys(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a cache makes of keys, or of queries but for the rounding of their scales."""
    codes, scales = quantised_rows(x, bf16=True)
    return codes * np.repeat(scales, DIMS, axis=-1)


def held_values(x: NDArray[np.float32]) -> NDArray[np.float32]:
    codes, scales = quantised(x, bf16=False)
    return codes * scales[..., None]


def block_bytes(dim: int) -> int:
    """Of the keys or the values of one head in a block."""
    return code_bytes(dim) + scale_bytes(dim)


def key_block(codes: Codes, scales: Scales) -> NDArray[np.uint8]:
    """A block of one head: codes [16, head_dim], scales [16, head_dim / 16] that bfloat16 holds."""
    dim = codes.shape[1]
    block, places = np.zeros(block_bytes(dim), np.uint8), range(BLOCK)
    halves = round_to_bf16(np.ascontiguousarray(scales.T)).view(np.uint8)
    for d in range(dim):
        for position in places:
            block[d // 4 * 64 + position * 4 + d % 4] = codes[position, d] + 128
    block[BLOCK * dim :][: halves.size] = halves.ravel()
    return block


def value_block(codes: Codes, scales: Scales) -> NDArray[np.uint8]:
    """A block of one head: codes [16, head_dim], scales [16]."""
    dim = codes.shape[1]
    block = np.zeros(block_bytes(dim), np.uint8)
    for d in range(dim):
        for position in range(BLOCK):
            block[d // 16 * 256 + position // 4 * 64 + d % 16 * 4 + position % 4] = codes[position, d] & 0xFF
    block[BLOCK * dim :][: 4 * BLOCK] = scales.astype(np.float32).view(np.uint8)
    return block


def query_row(codes: Codes, scales: Scales) -> NDArray[np.uint8]:
    """One head of one token: codes [head_dim], scales [head_dim / 16]."""
    dim = len(codes)
    row = np.zeros(query_bytes(dim), np.uint8)
    row[:dim] = codes & 0xFF
    pairs = row[dim:].view(np.uint32).reshape(-1, 2)
    pairs[:, 0] = scales.astype(np.float32).view(np.uint32)
    pairs[:, 1] = (-128 * codes.reshape(-1, DIMS).sum(axis=1)).astype(np.int32).view(np.uint32)
    return row


def scores(q: tuple[Codes, Scales], k: tuple[Codes, Scales]) -> NDArray[np.float64]:
    """q @ k: [rows, 16], of codes and scales of queries and of a block's keys."""
    (q_codes, q_scales), (k_codes, k_scales) = q, k
    total = np.zeros((len(q_codes), BLOCK))
    for g in range(q_scales.shape[1]):
        part = slice(g * DIMS, (g + 1) * DIMS)
        dots = q_codes[:, part] @ k_codes[:, part].T
        total += dots * q_scales[:, g, None].astype(np.float64) * k_scales[:, g].astype(np.float64)
    return total
