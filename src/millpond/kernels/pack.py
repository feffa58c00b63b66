"""Weights into the layouts of the tiles (drawn in matmul.py). The arrays live as long as the Packed that holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.matmul import BF16, COLUMNS, F32_WEIGHTS, GROUP, U4, U8

LINE = 64  # bytes of a cache line


@dataclass(frozen=True, slots=True)
class Form:
    """What decides the arrays of a packed layer: its kind of tile, its outputs and its inputs."""

    kind: int
    columns: int
    depth: int

    def arrays(self) -> list[tuple[type[np.generic], tuple[int, ...]]]:
        """The types and shapes of the weights and, where the kind has them, of the scales."""
        tiles = padded(self.columns) // COLUMNS
        if self.kind == F32_WEIGHTS:
            return [(np.float32, (tiles, self.depth, COLUMNS))]
        weights = (np.uint32, (tiles, self.depth // {U4: 8, U8: 4, BF16: 2}[self.kind], COLUMNS))
        return [weights] if self.kind == BF16 else [weights, (np.uint16, (tiles, self.depth // GROUP, 2, COLUMNS))]


@dataclass(frozen=True, slots=True)
class Packed:
    """One linear layer, packed: `columns` outputs (the last tile filled up with zeros), `depth` inputs."""

    kind: int
    columns: int
    depth: int
    weights: NDArray[np.generic]
    scales: NDArray[np.uint16] | None = None

    def descriptor(self) -> list[int]:
        """The layer's row of numbers for the kernels (matmul.py): no outlier channels, nothing added to."""
        scales = 0 if self.scales is None else self.scales.ctypes.data
        return [self.kind, padded(self.columns), self.depth, self.weights.ctypes.data, scales, 0, 0, 0, 0, 0]

    def copy_from(self, other: "Packed") -> None:
        """Take over the values of another layer of the same form."""
        self.weights[...] = other.weights
        if self.scales is not None:
            self.scales[...] = other.scales


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
            end = start + prod(shape) * np.dtype(kind).itemsize
            arrays.append(room[start:end].view(kind).reshape(shape))
            start += _size(kind, shape)
        layers.append(Packed(form.kind, form.columns, form.depth, *arrays))
    return layers


def empty_room(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins on a cache line."""
    room = np.empty(num_bytes + LINE, np.uint8)
    first = -room.ctypes.data % LINE
    return room[first : first + num_bytes]


def _size(kind: type[np.generic], shape: tuple[int, ...]) -> int:
    """Bytes of an array, up to a whole number of cache lines."""
    return -(-prod(shape) * np.dtype(kind).itemsize // LINE) * LINE


def padded(columns: int) -> int:
    """The columns that whole tiles cover."""
    return -(-columns // COLUMNS) * COLUMNS


def pack_affine(codes: NDArray[np.uint8], scale: NDArray[np.float16], offset: NDArray[np.float16], bits: int) -> Packed:
    """w[n, k] = scale[n, k // 32] * codes[n, k] + offset[n, k // 32]; codes [N, K], scale and offset [N, K / 32]."""
    columns, depth = codes.shape
    codes, scale, offset = (_fill_tiles(each) for each in (codes, scale, offset))
    fours = codes.view(np.uint32)  # four k of a column side by side
    if bits == 4:
        pairs = fours.reshape(len(codes), depth // 8, 2)
        fours = pairs[..., 0] | (pairs[..., 1] << 4)
    weights = np.ascontiguousarray(_by_tile(fours).transpose(0, 2, 1))
    both = np.stack([_by_tile(scale), _by_tile(offset)])  # [2, tiles, 48, groups]
    scales = np.ascontiguousarray(both.transpose(1, 3, 0, 2)).view(np.uint16)
    return Packed(U4 if bits == 4 else U8, columns, depth, weights, scales)


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
        rows = _unpack_affine(packed, tiles)
    return rows[: packed.columns]


def channel_weights(packed: Packed, channels: NDArray[np.int64]) -> NDArray[np.float32]:
    """The weights of some input channels of an affine layer: float32 [tiles, channels, 48]."""
    assert packed.scales is not None
    k, bits = channels[:, None], 4 if packed.kind == U4 else 8
    shift = 8 * (k % 4) + (k & 4 if bits == 4 else 0)  # of a 4-bit tile's 8 channels, the last 4 are the high nibbles
    codes = packed.weights[:, channels // (32 // bits)] >> shift.astype(np.uint32) & np.uint32((1 << bits) - 1)
    scale, offset = np.moveaxis(packed.scales.view(np.float16)[:, channels // GROUP].astype(np.float32), 2, 0)
    return np.ascontiguousarray(scale * codes.astype(np.float32) + offset)


def _unpack_affine(packed: Packed, tiles: int) -> NDArray[np.float32]:
    assert packed.scales is not None
    fours = packed.weights.transpose(0, 2, 1)
    if packed.kind == U4:
        fours = np.stack([fours & 0x0F0F0F0F, (fours >> 4) & 0x0F0F0F0F], axis=-1)
    codes = np.ascontiguousarray(fours).view(np.uint8).reshape(tiles * COLUMNS, packed.depth)
    scale, offset = packed.scales.view(np.float16).astype(np.float32).transpose(2, 0, 3, 1)
    scale, offset = (np.repeat(each.reshape(tiles * COLUMNS, -1), GROUP, axis=1) for each in (scale, offset))
    return scale * codes + offset
