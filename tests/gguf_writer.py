"""A small GGUF writer for tests: it writes what it is told, also what no reader should accept.

write_gguf() makes a whole file; the pieces under it (string, value, pair, tensor_info, assemble) let a
test put a lie in any one field and leave the rest right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants

SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)


@dataclass(frozen=True)
class Typed:
    """A metadata value with its type id written out, where the guess of `type_of` is not what the test wants."""

    type_id: int
    value: Any


@dataclass(frozen=True)
class TensorData:
    """One tensor as the file holds it: shape in numpy order (rows, K), ggml type id, packed bytes."""

    shape: tuple[int, ...]
    type_id: int
    data: bytes


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def type_of(value: Any) -> int:
    if isinstance(value, Typed):
        return value.type_id
    if isinstance(value, list | tuple):
        return ARRAY
    kinds: dict[type, int] = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING, bytes: STRING}
    return kinds[type(value)]


def payload(value: Any) -> bytes:
    """The bytes of a value after its type id."""
    type_id = type_of(value)
    value = value.value if isinstance(value, Typed) else value
    if type_id == STRING:
        return string(value)
    if type_id != ARRAY:
        return struct.pack("<" + SCALAR_FORMATS[type_id], value)
    item_type = type_of(value[0]) if value else INT32
    if all(type(item) is int for item in value):
        return struct.pack(f"<IQ{len(value)}i", INT32, len(value), *value)
    return struct.pack("<IQ", item_type, len(value)) + b"".join(payload(item) for item in value)


def pair(key: str | bytes, value: Any) -> bytes:
    return string(key) + struct.pack("<I", type_of(value)) + payload(value)


def tensor_info(name: str | bytes, shape: Sequence[int], type_id: int, offset: int) -> bytes:
    """`shape` in numpy order; the file holds it the other way round, fastest dimension first."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dims + struct.pack("<IQ", type_id, offset)


def assemble(
    pairs: Iterable[bytes],
    infos: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A whole file; the two counts are the true ones where they are not given."""
    pairs, infos = list(pairs), list(infos)
    num_pairs = len(pairs) if num_pairs is None else num_pairs
    num_tensors = len(infos) if num_tensors is None else num_tensors
    head = magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorData], *, version: int = 3, alignment: int = 32
) -> None:
    """Write a valid file. An alignment other than 32 is written into the metadata too."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    infos, data = [], bytearray()
    for name, tensor in tensors.items():
        data.extend(bytes(-len(data) % alignment))
        infos.append(tensor_info(name, tensor.shape, tensor.type_id, len(data)))
        data.extend(tensor.data)
    pairs = [pair(key, value) for key, value in metadata.items()]
    path.write_bytes(assemble(pairs, infos, bytes(data), version=version, alignment=alignment))


def quantize(values: np.ndarray, type_name: str) -> TensorData:
    """Float32 values packed as a ggml type, given by its name (F32, F16, BF16, Q8_0, Q4_0, ...)."""
    kind = GGMLQuantizationType[type_name]
    packed = quants.quantize(np.ascontiguousarray(values, dtype=np.float32), kind)
    return TensorData(tuple(values.shape), int(kind), packed.tobytes())


def dequantize(tensor: TensorData) -> np.ndarray:
    """What the packed values mean, float32 [shape], by the gguf package."""
    kind = GGMLQuantizationType(tensor.type_id)
    kinds = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    packed = np.frombuffer(tensor.data, dtype=kinds.get(kind, np.uint8))
    return quants.dequantize(packed.reshape(*tensor.shape[:-1], -1), kind).astype(np.float32).reshape(tensor.shape)
