"""What a quantised tensor means: `dequantize`, the plain reference, and `to_affine`, the form the kernels take.

A block holds 32 values of one row: a scale d, perhaps a minimum m (both f16), and a code q for each value.
w = d * (q - zero) for the types without a minimum, w = d * q + m for those with one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError
from millpond.load.ggml_types import GGMLType
from millpond.load.gguf import GGUFTensor

GROUP = 32

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
FOUR_BITS = {GGMLType.Q4_0, GGMLType.Q4_1}


@dataclass(frozen=True, slots=True)
class AffineWeights:
    """w = scale * code + offset, exactly what `dequantize` gives.

    codes: uint8 [N, K], each below 2**bits. scale, offset: float16 [N, K // 32]. bits: 4, or 8 for 5-bit types too.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[np.float16]
    offset: NDArray[np.float16]
    bits: int


def dequantize(tensor: GGUFTensor) -> NDArray[np.float32]:
    """Float32 values of `tensor.shape`. Raises ModelFileError where the tensor holds what is not finite."""
    if tensor.type not in LAYOUTS:
        return _floats(tensor)
    blocks = _blocks(tensor)
    codes = _codes(tensor.type, blocks).astype(np.float32)
    d = blocks["d"].astype(np.float32)[:, None]
    if tensor.type in ZEROS:
        values = d * (codes - np.float32(ZEROS[tensor.type]))
    else:
        values = d * codes + blocks["m"].astype(np.float32)[:, None]
    return values.reshape(tensor.shape)


def dequantize_channels(tensor: GGUFTensor, channels: NDArray[np.int64]) -> NDArray[np.float32]:
    """Some columns of a quantised matrix, float32 [rows, channels], without looking at the others."""
    rows, depth = tensor.shape
    blocks = tensor.data.view(LAYOUTS[tensor.type]).reshape(rows, depth // GROUP)[:, channels // GROUP]
    some = replace(
        tensor, data=np.ascontiguousarray(blocks).view(np.uint8).reshape(-1), shape=(rows, channels.size * GROUP)
    )
    return dequantize(some)[:, np.arange(channels.size) * GROUP + channels % GROUP]


def affine_bits(kind: GGMLType) -> int | None:
    """The bits of a code in the affine form of a type, or None for F32, F16 and BF16."""
    if kind not in LAYOUTS:
        return None
    return 4 if kind in FOUR_BITS else 8


def to_affine(tensor: GGUFTensor) -> AffineWeights | None:
    """The weights as unsigned codes in groups of 32, or None for F32, F16 and BF16.

    Nothing is lost: an offset of -zero * d is d times a power of two. Where that is beyond float16's 65504, and
    where a scale is not finite, ModelFileError names the tensor and the group.
    """
    if tensor.type not in LAYOUTS:
        return None
    if len(tensor.shape) != 2:
        raise ModelFileError(f"tensor {tensor.name!r} has shape {tensor.shape}; a quantised one must be a matrix")
    blocks = _blocks(tensor)
    scale = np.ascontiguousarray(blocks["d"])
    groups = (tensor.shape[0], tensor.shape[1] // GROUP)
    return AffineWeights(
        codes=_codes(tensor.type, blocks).reshape(tensor.shape),
        scale=scale.reshape(groups),
        offset=_offset(tensor, blocks, scale).reshape(groups),
        bits=4 if tensor.type in FOUR_BITS else 8,
    )


def _blocks(tensor: GGUFTensor) -> np.ndarray:
    """The blocks as records, a view, after a look at every scale and minimum."""
    blocks = tensor.data.view(LAYOUTS[tensor.type])
    for field in ("d", "m"):
        if field in (blocks.dtype.names or ()):
            _require_finite(tensor, np.isfinite(blocks[field]), "a scale" if field == "d" else "a minimum", GROUP)
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
        values = tensor.data.view({GGMLType.F32: "<f4", GGMLType.F16: "<f2"}[tensor.type]).astype(np.float32)
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
