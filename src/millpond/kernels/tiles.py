"""The tiles that a model needs, each compiled on its own for this processor, as a table of addresses."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.amx import first_rows, more_rows
from millpond.kernels.amx_attention import attend_rows, fits
from millpond.kernels.attention import BF16_KV, GROUP_TOKENS, KV_KINDS, TILE_ROWS, cap_scores, score, softmax, value
from millpond.kernels.isa import AMX, ISAS, vectors_of
from millpond.kernels.link import entry_point
from millpond.kernels.matmul import BF16, F32_WEIGHTS, FIRST_U4, KINDS, NEAR_U8, ROWS, U4, U8, gemm

# The kinds of tile that a kind of layer takes.
TILES_OF = {U4: {U4, FIRST_U4, NEAR_U8, U8}, U8: {U8, NEAR_U8}, BF16: {BF16}, F32_WEIGHTS: {F32_WEIGHTS}}


class Tiles(NamedTuple):
    """Addresses by literal: gemm [kind, rows], score [rows], softmax [windowed], value [rows, vectors]; 0 where the
    model needs none. threads: how many share a step. By AMX, or 0: first_rows [kind, 16 rows together], more_rows in
    place of gemm, attend_rows [capped] in place of score, softmax, cap and value."""

    threads: int
    gemm: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    more_rows: int
    score: NDArray[np.int64]
    softmax: NDArray[np.int64]
    cap: int
    value: NDArray[np.int64]
    attend_rows: NDArray[np.int64]


def load_tiles(
    isa: str,
    threads: int,
    *,
    kinds: Iterable[int],
    kv_dtype: type[np.generic],
    heads_per_kv: int,
    head_dim: int,
    windowed: bool = False,
    capped: bool = False,
    link: Callable[..., int] = entry_point,
) -> Tiles:
    """Compile, or load from the cache, the tiles for these kinds of weights, K/V type and shape of attention.

    windowed: some layer attends to a window only; capped: scores are capped.
    link is called with each function and the types of its arguments, and returns its address.
    """
    level, kv = types.literal(vectors_of(isa)), types.literal(KV_KINDS[kv_dtype])
    ints = [types.int64] * 15
    gemms, first = np.zeros((KINDS, ROWS + 1), np.int64), np.zeros((U8 + 1, 3), np.int64)
    by_amx = {U4, U8, BF16}.intersection(kinds) if ISAS[isa] == AMX else set()
    for kind in set().union(*(TILES_OF[kind] for kind in set(kinds) - by_amx)):
        for rows in range(ROWS if kind in (NEAR_U8, FIRST_U4) else 1, ROWS + 1):
            gemms[kind, rows] = link(gemm, level, types.literal(kind), types.literal(rows), *ints)
    for kind in by_amx - {BF16}:
        for together in (1, 2):
            first[kind, together] = link(first_rows, types.literal(kind), types.literal(together), *ints[:10])
    scores, values = np.zeros(TILE_ROWS + 1, np.int64), np.zeros((TILE_ROWS + 1, 5), np.int64)
    attends = ISAS[isa] == AMX and KV_KINDS[kv_dtype] == BF16_KV and fits(head_dim)
    for rows in () if attends else attention_rows(heads_per_kv):
        literal = types.literal(rows)
        scores[rows] = link(score, level, kv, literal, *ints[:8])
        for vectors in [4] * (head_dim >= 64) + [1] * (head_dim % 64 > 0):
            values[rows, vectors] = link(value, level, kv, literal, types.literal(vectors), *ints[:13])
    softmaxes, by_rows = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for kind in range(0 if attends else 1 + windowed):
        softmaxes[kind] = link(softmax, level, kv, types.literal(kind), types.float32, *ints[:8])
    for kind in range(1 + capped if attends else 0):
        shape = types.literal(head_dim), types.literal(kind)
        by_rows[kind] = link(attend_rows, *shape, *ints[:12], types.float32, types.float32, *ints[:8])
    return Tiles(
        threads=threads,
        gemm=gemms,
        first_rows=first,
        more_rows=link(more_rows, *ints[:8]) if by_amx else 0,
        score=scores,
        softmax=softmaxes,
        cap=link(cap_scores, types.int64, types.float32, types.float32, types.int64) if capped and not attends else 0,
        value=values,
        attend_rows=by_rows,
    )


def attention_rows(heads_per_kv: int) -> set[int]:
    """The numbers of query rows that a tile is called with, for groups of 1 to GROUP_TOKENS tokens."""
    groups = [tokens * heads_per_kv for tokens in range(1, GROUP_TOKENS + 1)]
    return {min(TILE_ROWS, rows - first) for rows in groups for first in range(0, rows, TILE_ROWS)}
