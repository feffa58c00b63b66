"""Weights into the layouts of the tiles (drawn in matmul.py). The arrays live as long as the Packed that holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.matmul import (
    BF16,
    COLUMNS,
    F32_WEIGHTS,
    GROUP,
    HALF,
    LINE,
    MOST_OUTLIERS,
    STEP_BITS,
    U4,
    U4_GROUP,
    U8,
    U8_GROUP,
    ZERO_CODE,
)

LARGEST_CODE = 126  # that a weight is rounded to; what a step and a base are rounded to may reach one more
# Of step * nibble only the whole part counts, which is 1/2 less on average, but for the nibble 0. Over all nibbles the
# squared errors are least with a base that starts about so much higher, and what whole bases leave of the 1/2 is made
# up for by the step, by sum(q) / sum(q**2) of the nibbles q.
BASE_SHIFT = np.float32(0.386)
STEP_SHARE = np.float32(sum(range(16)) / sum(q * q for q in range(16)))
COLUMNS_AT_ONCE = 32 * COLUMNS  # that are packed together, so that what is in between stays small


@dataclass(frozen=True, slots=True)
class Form:
    """What decides the arrays of a packed layer: its kind of tile, its outputs and its inputs."""

    kind: int
    columns: int
    depth: int

    def arrays(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """The types and shapes of the weights and, where the kind has them, of the outlier channels' weights."""
        tiles = padded(self.columns) // COLUMNS
        if self.kind == F32_WEIGHTS:
            return [(np.dtype(np.float32), (tiles, self.depth, COLUMNS))]
        if self.kind == BF16:
            return [(np.dtype(np.uint32), (tiles, self.depth // 2, COLUMNS))]
        weights = (U4_GROUP if self.kind == U4 else U8_GROUP, (tiles, self.depth // GROUP))
        return [weights, (np.dtype(np.float32), (tiles, MOST_OUTLIERS, COLUMNS))]


@dataclass(frozen=True, slots=True)
class Packed:
    """One linear layer, packed: `columns` outputs (the last tile filled up with zeros), `depth` inputs.

    outliers: the weights of the outlier channels, once they are known; only integer kinds have them.
    """

    kind: int
    columns: int
    depth: int
    weights: NDArray[np.generic]
    outliers: NDArray[np.float32] | None = None

    def descriptor(self) -> list[int]:
        """The layer's row of numbers for the kernels (matmul.py): no outlier channels, nothing added to."""
        outliers = 0 if self.outliers is None else self.outliers.ctypes.data
        return [self.kind, padded(self.columns), self.depth, self.weights.ctypes.data, 0, 0, outliers, 0, 0]

    def copy_from(self, other: "Packed") -> None:
        """Take over the weights of another layer of the same form."""
        self.weights[...] = other.weights
        if self.outliers is not None:
            self.outliers[...] = other.outliers

    def put_outliers(self, weights: NDArray[np.float32]) -> None:
        """Keep the exact weights of the outlier channels, float32 [columns, channels]."""
        assert self.outliers is not None
        self.outliers[:, : weights.shape[1]] = _by_tile(_fill_tiles(weights)).transpose(0, 2, 1)


def size_side_by_side(forms: Sequence[Form]) -> int:
    """Bytes that layers of these forms take in one run of memory."""
    return sum(_size(*each) for form in forms for each in form.arrays())


def side_by_side(forms: Sequence[Form], room: NDArray[np.uint8]) -> list[Packed]:
    """Layers of these forms as views of one run of memory, in order, each array on a cache line of its own.

    One run is large enough for the system to back it with huge pages.
    """
    layers, start = [], 0
    for form in forms:
        arrays = []
        for kind, shape in form.arrays():
            end = start + prod(shape) * kind.itemsize
            arrays.append(room[start:end].view(kind).reshape(shape))
            start += _size(kind, shape)
        layers.append(Packed(form.kind, form.columns, form.depth, *arrays))
    return layers


def empty_room(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins on a cache line."""
    room = np.empty(num_bytes + LINE, np.uint8)
    first = -room.ctypes.data % LINE
    return room[first : first + num_bytes]


def _size(kind: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Bytes of an array, up to a whole number of cache lines."""
    return -(-prod(shape) * kind.itemsize // LINE) * LINE


def padded(columns: int) -> int:
    """The columns that whole tiles cover."""
    return -(-columns // COLUMNS) * COLUMNS


def pack_affine(codes: NDArray[np.uint8], scale: NDArray[np.float16], offset: NDArray[np.float16], bits: int) -> Packed:
    """w[n, k] = scale[n, k // 32] * codes[n, k] + offset[n, k // 32], rounded to the integers of a 4- or 8-bit tile.

    codes [N, K], scale and offset [N, K / 32]; K is a multiple of 64. Raises ValueError where a weight is too large.
    """
    pack, parts = _pack_nibbles if bits == 4 else _pack_codes, []
    for first in range(0, len(codes), COLUMNS_AT_ONCE):
        some = slice(first, first + COLUMNS_AT_ONCE)
        affine = scale[some].astype(np.float32), offset[some].astype(np.float32)
        parts.append(pack(*map(_fill_tiles, (codes[some], *affine))))
    outliers = np.zeros((padded(len(codes)) // COLUMNS, MOST_OUTLIERS, COLUMNS), np.float32)
    return Packed(U4 if bits == 4 else U8, *codes.shape, np.concatenate(parts), outliers)


def _pack_codes(codes: NDArray[np.uint8], scale: NDArray[np.float32], offset: NDArray[np.float32]) -> NDArray[np.void]:
    """8-bit weights of whole tiles: [tiles, groups] of U8_GROUP."""
    columns, depth = codes.shape
    weights = codes.reshape(columns, -1, HALF) * scale[..., None] + offset[..., None]
    weights = weights.reshape(columns, depth // GROUP, GROUP)
    unit, inverse = _units(np.abs(weights).max(axis=-1))
    rounded = np.rint(weights * inverse[..., None]).astype(np.int8)
    tiles = np.zeros((columns // COLUMNS, depth // GROUP), U8_GROUP)
    tiles["codes"] = _by_group(rounded.view(np.uint32) ^ np.uint32(0x80808080))
    tiles["scales"] = _by_group(unit[..., None])[:, :, 0]
    return tiles


def _pack_nibbles(
    codes: NDArray[np.uint8], scale: NDArray[np.float32], offset: NDArray[np.float32]
) -> NDArray[np.void]:
    """4-bit weights of whole tiles: [tiles, groups] of U4_GROUP."""
    columns, depth = codes.shape
    falls = scale < 0  # turned round, so that steps are not negative
    codes = codes ^ np.repeat(np.where(falls, np.uint8(15), np.uint8(0)), HALF, axis=1)
    offset = np.where(falls, offset + 15 * scale, offset)
    scale, halves = np.abs(scale), (columns, depth // GROUP, 2)
    ends = np.maximum(np.abs(offset), np.abs(offset + 15 * scale))
    unit, inverse = _units(ends.reshape(halves).max(axis=-1))
    step, start = (each.reshape(halves) * inverse[..., None] for each in (scale, offset))
    base = np.rint(start + BASE_SHIFT)
    step = step + STEP_SHARE * (start + np.float32(0.5) - base)
    tiles = np.zeros((columns // COLUMNS, depth // GROUP), U4_GROUP)
    pairs = codes.reshape(columns, -1, 4, 2)[..., ::-1].reshape(columns, depth // 8, 8)  # even and odd k change places
    tiles["nibbles"] = _by_group(
        (pairs[..., :4] | pairs[..., 4:] << 4).view(np.uint32).reshape(columns, -1, GROUP // 8)
    )
    tiles["steps"] = _by_group(np.maximum(np.rint(step * (1 << STEP_BITS)), 0))
    tiles["bases"] = _by_group(base + ZERO_CODE)
    tiles["scales"] = _by_group(unit[..., None])[:, :, 0]
    return tiles


def _units(largest: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """A scale in which the largest weight of each group is at most LARGEST_CODE, and 1 / scale (0 where all are 0)."""
    exact = largest / np.float32(LARGEST_CODE)
    with np.errstate(over="ignore"):
        unit = exact.astype(np.float16)
        unit = np.where(unit.astype(np.float32) < exact, np.nextafter(unit, np.float16(np.inf)), unit)
    if not np.isfinite(unit).all():
        limit = LARGEST_CODE * float(np.finfo(np.float16).max)
        raise ValueError(f"a weight of {largest.max():g} is beyond what 8 bits and a float16 scale can hold, {limit:g}")
    wide = unit.astype(np.float32)
    return unit, np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)


def _by_group(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """[columns, groups, parts of a group] as [tiles, groups, parts, 48]."""
    columns, groups, parts = values.shape
    return values.reshape(columns // COLUMNS, COLUMNS, groups, parts).transpose(0, 2, 3, 1)


def pack_float(weights: NDArray[np.float32], kind: int) -> Packed:
    """float32 [N, K] as bfloat16 (to nearest even) or float32 tiles."""
    columns, depth = weights.shape
    filled = _fill_tiles(weights)
    if kind == F32_WEIGHTS:
        return Packed(kind, columns, depth, np.ascontiguousarray(_by_tile(filled).transpose(0, 2, 1)))
    pairs = round_to_bf16(filled).view(np.uint32)
    return Packed(BF16, columns, depth, np.ascontiguousarray(_by_tile(pairs).transpose(0, 2, 1)))


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 to bfloat16 bits, to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _fill_tiles(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    """Rows of zeros up to a whole number of tiles."""
    missing = padded(len(rows)) - len(rows)
    return np.ascontiguousarray(np.pad(rows, ((0, missing), (0, 0))) if missing else rows)


def _by_tile(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    return rows.reshape(len(rows) // COLUMNS, COLUMNS, -1)


def unpack(packed: Packed) -> NDArray[np.float32]:
    """The float32 matrix [columns, depth] that a Packed stands for: the slow reference."""
    tiles = padded(packed.columns) // COLUMNS
    if packed.kind == F32_WEIGHTS:
        rows = packed.weights.transpose(0, 2, 1).reshape(tiles * COLUMNS, packed.depth)
    elif packed.kind == BF16:
        pairs = np.ascontiguousarray(packed.weights.transpose(0, 2, 1)).view(np.uint16)
        rows = (pairs.astype(np.uint32) << 16).view(np.float32).reshape(tiles * COLUMNS, packed.depth)
    else:
        rows = _unpack_integers(packed)
    return rows[: packed.columns]


def _unpack_integers(packed: Packed) -> NDArray[np.float32]:
    tiles = packed.weights
    if packed.kind == U8:
        codes = np.ascontiguousarray(tiles["codes"].transpose(0, 3, 1, 2)).view(np.uint8)  # [tiles, 48, groups, k]
    else:
        raw = np.ascontiguousarray(tiles["nibbles"].transpose(0, 3, 1, 2)).view(np.uint8)
        raw = raw.reshape(*raw.shape[:-1], GROUP // 8, 2, 2)[..., ::-1].reshape(*raw.shape[:-1], GROUP // 8, 4)
        nibbles = np.concatenate([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-2], 2, HALF)
        steps, bases = (tiles[name].transpose(0, 3, 1, 2)[..., None] for name in ("steps", "bases"))
        codes = (bases + (steps.astype(np.int32) * nibbles >> STEP_BITS)).reshape(*raw.shape[:-2], GROUP)
    scales = tiles["scales"].transpose(0, 2, 1)[..., None].astype(np.float32)
    return (scales * (codes.astype(np.float32) - ZERO_CODE)).reshape(-1, packed.depth)
