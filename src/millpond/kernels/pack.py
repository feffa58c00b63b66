"""Weights into the layouts of the tiles (drawn in matmul.py). The arrays live as long as the Packed that holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.isa import AMX, ISAS
from millpond.kernels.matmul import (
    AMX_U4,
    BF16,
    COLUMNS,
    F32_WEIGHTS,
    GROUP,
    HALF,
    LINE,
    MOST_OUTLIERS,
    SCALE_POWER,
    STEP_BITS,
    U4,
    U4_GROUP,
    U8,
    U8_GROUP,
    WEIGHT_POWER,
    ZERO_CODE,
)

LARGEST_CODE = 126  # that a weight is rounded to; what a step and a base are rounded to may reach one more
# Of step * nibble only the whole part counts, which is 1/2 less on average, but for the nibble 0. Over all nibbles the
# squared errors are least with a base that starts about so much higher, and what whole bases leave of the 1/2 is made
# up for by the step, by sum(q) / sum(q**2) of the nibbles q.
BASE_SHIFT = np.float32(0.386)
STEP_SHARE = np.float32(sum(range(16)) / sum(q * q for q in range(16)))
# Steps of nibbles that lose nothing: 8 fills the codes best, 1 is left to scales so small that an eighth is no float16.
WHOLE_STEPS = (1, 8)
VALUES_AT_ONCE = 1 << 18  # that are packed together, so that what is in between stays small


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

    def kind_for(self, isa: str) -> int:
        """The kind as the kernels of an instruction set are told: there is another where AMX multiplies the layer."""
        return self.kind + AMX_U4 if ISAS[isa] == AMX and self.kind <= BF16 else self.kind

    def descriptor(self, isa: str | None) -> list[int]:
        """The layer's row of numbers for the kernels (matmul.py): no outlier channels, nothing added to. isa: the
        instruction set that multiplies it, None for a table that is only read."""
        outliers = 0 if self.outliers is None else self.outliers.ctypes.data
        kind = self.kind if isa is None else self.kind_for(isa)
        power = self.power() if kind in (AMX_U4 + U4, AMX_U4 + U8) else 0
        return [kind, padded(self.columns), self.depth, self.weights.ctypes.data, 0, 0, outliers, 0, 0, power]

    def power(self) -> int:
        """By 2 ** which AMX meets integer weights smaller than they are, and their inputs larger; by the largest scale,
        so that no weight is beyond what a float16 holds."""
        scales = self.weights["scales"].view(np.uint16)  # whose order is that of positive float16
        _, exponent = np.frexp(scales.max().view(np.float16))
        return int(exponent) + WEIGHT_POWER - SCALE_POWER

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
    return _from_line(np.empty(num_bytes + LINE, np.uint8), num_bytes)


def aligned_zeros(shape: int | tuple[int, ...], dtype: type[np.generic] = np.uint8) -> NDArray[Any]:
    """Zeros that begin on a cache line. np.zeros has them begin 16 bytes behind one, and then every vector of 64 bytes
    would be parts of two."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return _from_line(np.zeros(num_bytes + LINE, np.uint8), num_bytes).view(dtype).reshape(shape)


def new_unpacked(depth: int, threads: int = 1) -> NDArray[np.uint8]:
    """Room for a tile of up to `depth` inputs that each thread unpacks, to bytes or bfloat16: [threads, bytes]."""
    return aligned_zeros(threads * depth * COLUMNS * 2).reshape(threads, -1)


def _from_line(room: NDArray[np.uint8], num_bytes: int) -> NDArray[np.uint8]:
    first = -room.ctypes.data % LINE
    return room[first : first + num_bytes]


def _size(kind: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Bytes of an array, up to a whole number of cache lines."""
    return -(-prod(shape) * kind.itemsize // LINE) * LINE


def padded(columns: int) -> int:
    """The columns that whole tiles cover."""
    return -(-columns // COLUMNS) * COLUMNS


def empty_layer(form: Form) -> Packed:
    """A layer in memory of its own, to be filled by put_affine or put_values."""
    return Packed(form.kind, form.columns, form.depth, *(np.empty(shape, kind) for kind, shape in form.arrays()))


def pieces(columns: int, depth: int) -> list[slice]:
    """The columns of a layer in pieces to be packed one after the other, each of whole tiles but the last."""
    at_once = max(VALUES_AT_ONCE // depth // COLUMNS, 1) * COLUMNS
    return [slice(first, min(first + at_once, columns)) for first in range(0, columns, at_once)]


def pack_affine(codes: NDArray[np.uint8], scale: NDArray[np.float16], offset: NDArray[np.float16], bits: int) -> Packed:
    """A whole layer by put_affine: codes [N, K], scale and offset [N, K / 32]; K is a multiple of 64."""
    layer = empty_layer(Form(U4 if bits == 4 else U8, *codes.shape))
    for some in pieces(*codes.shape):
        put_affine(layer, some.start, codes[some], scale[some], offset[some])
    return layer


def put_affine(
    layer: Packed,
    first: int,
    codes: NDArray[np.uint8],
    scale: NDArray[np.floating],
    offset: NDArray[np.floating],
) -> None:
    """Columns of a 4- or 8-bit layer, from `first` (a multiple of 48) on, to whole tiles.

    w[n, k] = scale[n, k // 32] * codes[n, k] + offset[n, k // 32]. A group of 64 is held exactly where its scale is one
    float16 and its offset so many times that; else it is rounded to integers times a float16. Raises ValueError where
    a weight is too large.
    """
    pack = _pack_nibbles if layer.kind == U4 else _pack_codes
    affine = scale.astype(np.float32), offset.astype(np.float32)
    _put_tiles(layer, first, pack(*map(_fill_tiles, (codes, *affine))))


def put_values(layer: Packed, first: int, weights: NDArray[np.float32]) -> None:
    """Columns of a bfloat16, float32 or 8-bit layer, from `first` on, rounded to what it holds: float32 [N, K]."""
    filled = _fill_tiles(weights)
    if layer.kind == U8:
        tiles = _round_to_codes(filled.reshape(len(filled), -1, GROUP))
    else:
        rows = filled if layer.kind == F32_WEIGHTS else round_to_bf16(filled).view(np.uint32)
        tiles = _by_tile(rows).transpose(0, 2, 1)
    _put_tiles(layer, first, tiles)


def _put_tiles(layer: Packed, first: int, tiles: NDArray[np.generic]) -> None:
    assert first % COLUMNS == 0
    place = slice(first // COLUMNS, first // COLUMNS + len(tiles))
    layer.weights[place] = tiles
    if layer.outliers is not None:
        layer.outliers[place] = 0


def _pack_codes(codes: NDArray[np.uint8], scale: NDArray[np.float32], offset: NDArray[np.float32]) -> NDArray[np.void]:
    """8-bit weights of whole tiles: [tiles, groups] of U8_GROUP."""
    columns, depth = codes.shape
    weights = codes.reshape(columns, -1, HALF) * scale[..., None] + offset[..., None]
    tiles = _round_to_codes(weights.reshape(columns, depth // GROUP, GROUP))
    zeros, exact = _common_zeros(scale, offset)
    groups = codes.reshape(columns, depth // GROUP, GROUP)
    exact &= (zeros == ZERO_CODE) & (groups.min(axis=-1) > 0)  # no kernel takes a code 0
    if exact.any():
        held = np.ascontiguousarray(groups).view(np.uint32)
        places = exact.reshape(-1, COLUMNS, depth // GROUP).transpose(0, 2, 1)
        tiles["codes"] = np.where(places[:, :, None], _by_group(held), tiles["codes"])
        tiles["scales"] = np.where(places, _by_group(scale[:, ::2, None])[:, :, 0], tiles["scales"])
    return tiles


def _round_to_codes(weights: NDArray[np.float32]) -> NDArray[np.void]:
    """The nearest 8-bit weights of whole tiles to float32 [columns, groups, 64]."""
    columns, groups, _ = weights.shape
    unit, inverse = _units(np.maximum(weights.max(axis=-1), -weights.min(axis=-1)))
    rounded = np.rint(weights * inverse[..., None]).astype(np.int8)
    tiles = np.zeros((columns // COLUMNS, groups), U8_GROUP)
    tiles["codes"] = _by_group(rounded.view(np.uint32) ^ np.uint32(0x80808080))
    tiles["scales"] = _by_group(unit[..., None])[:, :, 0]
    return tiles


def _common_zeros(
    scale: NDArray[np.float32], offset: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The code that means 0 in each group of 64, and where it is a whole number that its halves share, as they do
    their scale, which is a float16: [columns, groups]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zeros = np.rint(-offset / scale)
        exact = (scale > 0) & (scale.astype(np.float16) == scale) & (zeros * scale == -offset)
    same = (scale[:, ::2] == scale[:, 1::2]) & (zeros[:, ::2] == zeros[:, 1::2])
    return zeros[:, ::2], exact[:, ::2] & exact[:, 1::2] & same


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
    _hold_exactly(scale, offset, unit, step, base)
    tiles = np.zeros((columns // COLUMNS, depth // GROUP), U4_GROUP)
    pairs = codes.reshape(columns, -1, 4, 2)[..., ::-1].reshape(columns, depth // 8, 8)  # even and odd k change places
    tiles["nibbles"] = _by_group(
        (pairs[..., :4] | pairs[..., 4:] << 4).view(np.uint32).reshape(columns, -1, GROUP // 8)
    )
    tiles["steps"] = _by_group(np.maximum(np.rint(step * (1 << STEP_BITS)), 0))
    tiles["bases"] = _by_group(base + ZERO_CODE)
    tiles["scales"] = _by_group(unit[..., None])[:, :, 0]
    return tiles


def _hold_exactly(
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    unit: NDArray[np.float16],
    step: NDArray[np.float32],
    base: NDArray[np.float32],
) -> None:
    """Where 16 multiples of one float16 are meant, they get a whole step, which loses nothing: in place."""
    zeros, exact = _common_zeros(scale, offset)
    exact &= (zeros >= 0) & (zeros <= 15)
    for whole in WHOLE_STEPS:  # the last wins
        own = (scale[:, ::2] / np.float32(whole)).astype(np.float16)
        holds = exact & (own.astype(np.float32) * np.float32(whole) == scale[:, ::2])
        unit[holds], step[holds], base[holds] = own[holds], whole, -whole * zeros[holds, None]


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
    layer = empty_layer(Form(kind, *weights.shape))
    put_values(layer, 0, weights)
    return layer


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
