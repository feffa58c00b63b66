"""What a quantised tensor means: `dequantize`, the plain reference, and `to_affine`, the form the kernels take.

A block of the plain types holds 32 values of one row: a scale d, perhaps a minimum m (both f16), and a code q for each.
w = d * (q - zero) for the types without a minimum, w = d * q + m for those with one. The others are the gguf package's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError
from millpond.load.affine import GROUP, AffineWeights
from millpond.load.ggml_types import BLOCKS, SUPPORTED, GGMLType
from millpond.load.gguf import GGUFTensor
from millpond.load.integer_tensor import IntegerTensor
from millpond.load.mapped import forget

Tensor = GGUFTensor | IntegerTensor

_D = ("d", "<f2")
_M = ("m", "<f2")
_HIGH = ("high", "<u4")  # the fifth bit of each of the 32 codes, value 0 lowest
_NIBBLES = ("nibbles", "u1", (16,))  # values 0..15 in the low halves, 16..31 in the high halves
LAYOUTS = {
    GGMLType.Q4_0: np.dtype([_D, _NIBBLES]),
    GGMLType.Q4_1: np.dtype([_D, _M, _NIBBLES]),
    GGMLType.Q5_0: np.dtype([_D, _HIGH, _NIBBLES]),
    GGMLType.Q5_1: np.dtype([_D, _M, _HIGH, _NIBBLES]),
    GGMLType.Q8_0: np.dtype([_D, ("bytes", "u1", (32,))]),
}
# The unsigned code that means 0, for the types that have no minimum.
ZEROS = {GGMLType.Q4_0: 8, GGMLType.Q5_0: 16, GGMLType.Q8_0: 128}
# 256 values: eight groups of 32 with a scale and a minimum of 6 bits each, in units of d and m.
Q4_K_LAYOUT = np.dtype([_D, _M, ("scales", "u1", (12,)), ("nibbles", "u1", (128,))])
TERNARY = (GGMLType.TQ1_0, GGMLType.TQ2_0)  # the block ends with d
FLOATS = {GGMLType.F32: "<f4", GGMLType.F16: "<f2", GGMLType.BF16: "<u2"}


def dequantize(tensor: Tensor) -> NDArray[np.float32]:
    """Float32 values of `tensor.shape`. Raises ModelFileError where the tensor holds what is not finite."""
    if isinstance(tensor, IntegerTensor):
        return tensor.values()
    if tensor.type in FLOATS:
        return _floats(tensor)
    if tensor.type not in LAYOUTS:
        return _by_gguf(tensor)
    blocks = _blocks(tensor, LAYOUTS[tensor.type])
    codes = _codes(tensor.type, blocks).astype(np.float32)
    d = blocks["d"].astype(np.float32)[:, None]
    if tensor.type in ZEROS:
        values = d * (codes - np.float32(ZEROS[tensor.type]))
    else:
        values = d * codes + blocks["m"].astype(np.float32)[:, None]
    return values.reshape(tensor.shape)


def take_rows(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Some rows of a matrix in the order asked for, still as the file has them."""
    if isinstance(tensor, IntegerTensor):
        return tensor.take_rows(rows)
    data = tensor.data.reshape(tensor.shape[0], -1)
    if rows.size and np.array_equal(rows, np.arange(rows[0], rows[0] + rows.size)):
        some = data[rows[0] : rows[0] + rows.size]  # a view
    else:
        some = data[rows]
    return replace(tensor, shape=(rows.size, tensor.shape[1]), data=some.reshape(-1))


def forget_tensor(tensor: Tensor) -> None:
    """Give back the memory that what was read of a tensor's file takes."""
    if isinstance(tensor, IntegerTensor):
        for part in (tensor.words, tensor.scales, tensor.zeros):
            if part is not None:
                forget(part)
    else:
        forget(tensor.data)


def dequantize_channels(tensor: Tensor, channels: NDArray[np.int64]) -> NDArray[np.float32]:
    """Some columns of a matrix, float32 [rows, channels], without looking at the blocks of others."""
    if isinstance(tensor, IntegerTensor):
        return tensor.values(channels)
    rows, depth = tensor.shape
    values, num_bytes = BLOCKS[tensor.type]
    blocks = tensor.data.reshape(rows, depth // values, num_bytes)[:, channels // values]
    some = replace(tensor, data=np.ascontiguousarray(blocks).reshape(-1), shape=(rows, channels.size * values))
    return dequantize(some)[:, np.arange(channels.size) * values + channels % values]


def code_bits(tensor: Tensor) -> int | None:
    """The bits that the kernels need for a code of the tensor, 4 or 8, or None for F32, F16 and BF16."""
    if isinstance(tensor, IntegerTensor):
        return tensor.bits
    if tensor.type in FLOATS:
        return None
    return 4 if tensor.type in FOUR_BITS else 8


def has_affine(tensor: Tensor) -> bool:
    """Whether to_affine gives something."""
    return isinstance(tensor, IntegerTensor) or tensor.type in AFFINE


def to_affine(tensor: Tensor) -> AffineWeights | None:
    """The weights as unsigned codes in groups of 32, or None for the types that have no such form.

    Nothing is lost: an offset of -zero * d is d times a power of two. Where that is beyond float16's 65504, and
    where a scale is not finite, ModelFileError names the tensor and the group.
    """
    if isinstance(tensor, IntegerTensor):
        return tensor.affine()
    if tensor.type not in AFFINE:
        return None
    if len(tensor.shape) != 2:
        raise ModelFileError(f"tensor {tensor.name!r} has shape {tensor.shape}; a quantised one must be a matrix")
    codes, scale, offset = AFFINE[tensor.type](tensor)
    groups = (tensor.shape[0], tensor.shape[1] // GROUP)
    bits = 4 if tensor.type in FOUR_BITS else 8
    return AffineWeights(codes.reshape(tensor.shape), scale.reshape(groups), offset.reshape(groups), bits)


Parts = tuple[NDArray[np.uint8], NDArray[np.floating], NDArray[np.floating]]


def _plain(tensor: GGUFTensor) -> Parts:
    blocks = _blocks(tensor, LAYOUTS[tensor.type])
    scale = np.ascontiguousarray(blocks["d"])
    return _codes(tensor.type, blocks), scale, _offset(tensor, blocks, scale)


def _q4_k(tensor: GGUFTensor) -> Parts:
    """Scales and minima are products of a float16 and 6 bits, which float32 holds."""
    blocks = _blocks(tensor, Q4_K_LAYOUT)
    low, middle, high = (blocks["scales"][:, first : first + 4] for first in (0, 4, 8))
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    nibbles = blocks["nibbles"].reshape(-1, 4, 1, GROUP)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    scale, offset = blocks["d"].astype(np.float32)[:, None] * scales, -blocks["m"].astype(np.float32)[:, None] * minima
    return codes, scale, offset


def _ternary(tensor: GGUFTensor) -> Parts:
    """Codes of -d, 0, d, and 2 * d, which a code of two bits can say, too."""
    values, num_bytes = BLOCKS[tensor.type]
    scale = np.ascontiguousarray(tensor.data.reshape(-1, num_bytes)[:, -2:]).view("<f2")
    d = np.where(scale == 0, np.float32(1), scale.astype(np.float32))
    codes = (np.rint(_by_gguf(tensor).reshape(-1, values) / d) + 1).astype(np.uint8)
    scale = np.repeat(scale, values // GROUP, axis=1)
    return codes, scale, -scale


# The types that are affine in groups of 32 are mapped exactly; of the others the kernels take the rounded values.
AFFINE: dict[GGMLType, Callable[[GGUFTensor], Parts]] = {
    **dict.fromkeys(LAYOUTS, _plain),
    GGMLType.Q4_K: _q4_k,
    **dict.fromkeys(TERNARY, _ternary),
}
FOUR_BITS = {GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q4_K, *TERNARY}


def _by_gguf(tensor: GGUFTensor) -> NDArray[np.float32]:
    """By the gguf package, which is imported where it is needed: it takes a third of a second."""
    from gguf import GGMLQuantizationType, quants

    if tensor.type not in SUPPORTED:
        raise ModelFileError(f"tensor {tensor.name!r} is of type {tensor.kind}, which is no type of weights")
    if not tensor.data.size:
        return np.zeros(tensor.shape, np.float32)
    rows = tensor.data.reshape(-1, BLOCKS[tensor.type][1])
    with np.errstate(over="ignore", invalid="ignore"):
        values: NDArray[np.float32] = quants.dequantize(rows, GGMLQuantizationType(tensor.type))
    _require_finite(tensor, np.isfinite(values), "a value", 1)
    return values.reshape(tensor.shape)


def _blocks(tensor: GGUFTensor, layout: np.dtype[Any]) -> np.ndarray:
    """The blocks as records, a view, after a look at every scale and minimum."""
    blocks, values = tensor.data.view(layout), BLOCKS[tensor.type][0]
    for field in ("d", "m"):
        if field in (blocks.dtype.names or ()):
            _require_finite(tensor, np.isfinite(blocks[field]), "a scale" if field == "d" else "a minimum", values)
    return blocks


def _require_finite(tensor: GGUFTensor, finite: NDArray[np.bool_], what: str, values_each: int) -> None:
    if finite.all():
        return
    first = int(np.argmin(finite)) * values_each
    row, column = divmod(first, tensor.shape[-1])
    raise ModelFileError(
        f"tensor {tensor.name!r} ({tensor.type.name}) has {what} that is not finite at row {row}, column {column}; "
        f"{int(finite.size - np.count_nonzero(finite))} of {finite.size} are not: the file is damaged"
    )


def _floats(tensor: GGUFTensor) -> NDArray[np.float32]:
    if tensor.type is GGMLType.BF16:
        values = (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = tensor.data.view(FLOATS[tensor.type]).astype(np.float32)
    _require_finite(tensor, np.isfinite(values), "a value", 1)
    return values.reshape(tensor.shape)


def _codes(kind: GGMLType, blocks: np.ndarray) -> NDArray[np.uint8]:
    """Unsigned codes [num_blocks, 32]."""
    if kind is GGMLType.Q8_0:
        signed: NDArray[np.uint8] = blocks["bytes"]
        return signed ^ np.uint8(0x80)  # two's complement with the sign bit turned is q + 128
    codes = _nibbles(blocks["nibbles"])
    if "high" in (blocks.dtype.names or ()):
        codes |= _high_bits(blocks["high"])
    return codes


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The halves of [num_blocks, 16] bytes as [num_blocks, 32]. Eight bytes at a time: it is most of loading."""
    words = np.ascontiguousarray(packed).view(np.uint64)
    codes = np.empty((len(packed), 32), dtype=np.uint8)
    out = codes.view(np.uint64)
    mask = np.uint64(0x0F0F0F0F0F0F0F0F)
    for word in range(2):
        out[:, word] = words[:, word] & mask
        out[:, 2 + word] = (words[:, word] >> np.uint64(4)) & mask
    return codes


def _high_bits(bits: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Bit i of each word as 0 or 16 in column i: [num_blocks, 32]."""
    in_bytes = np.ascontiguousarray(bits).view(np.uint8).reshape(-1, 4)
    return np.unpackbits(in_bytes, axis=1, bitorder="little") << np.uint8(4)


def _offset(tensor: GGUFTensor, blocks: np.ndarray, scale: NDArray[np.float16]) -> NDArray[np.float16]:
    """What code 0 means, float16 [num_blocks]."""
    if tensor.type not in ZEROS:
        return np.ascontiguousarray(blocks["m"])
    zero = ZEROS[tensor.type]
    with np.errstate(over="ignore"):
        offset = scale * np.float16(-zero)
    if not np.isfinite(offset).all():
        largest = float(np.abs(scale).max())
        raise ModelFileError(
            f"tensor {tensor.name!r} ({tensor.type.name}) has a scale of {largest:g}; {zero} times that is beyond "
            f"float16's 65504, and at most {65504 / zero:g} can be run"
        )
    return offset
