"""A reader of GGUF files, versions 2 and 3: the metadata, and every tensor as a view into the mapped file, or files.

Layout: magic, version, tensor count, pair count | metadata pairs | tensor table | padding | tensor data.
All of it is checked before a tensor is handed out, in time and memory bounded by the size of the header.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError
from millpond.load.cursor import Cursor
from millpond.load.ggml_types import BLOCKS, SUPPORTED, GGMLType
from millpond.load.mapped import map_file
from millpond.load.parts import part_names

HEADER_BYTES = 24
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
MAX_PAIRS = 2**16
MAX_TENSORS = 2**17
MAX_ITEMS = 2**23  # items of all metadata arrays together; the largest vocabularies need about 2**21
MAX_DEPTH = 4
MAX_DIMENSIONS = 4
MAX_PARTS = 99_999  # five digits
MIN_PAIR_BYTES = 8 + 4 + 1  # an empty key, its type, one byte
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, type, offset

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "<u1", 10: "<u8", 11: "<i8",
           12: "<f8"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor. `shape` is in numpy order, (rows, K) or (K,); `data` is uint8 [num_bytes], read-only, not copied."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    data: NDArray[np.uint8]

    @property
    def kind(self) -> str:
        """Its type, for messages."""
        return self.type.name


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file. Arrays in the metadata are lists; the file stays mapped for as long as a tensor is referred to.

    path: the file, or the first part of a split one; paths: all parts.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of the tensor table: `offset` counts from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    num_bytes: int


def open_gguf(path: Path) -> GGUFFile:
    """Map `path` and check all of it; if it is a part of a split model, the other parts beside it, too.

    Raises ModelFileError naming the file, the tensor or key, and both numbers.
    """
    whole = _open_part(path)
    if (parts := _split_number(whole, "split.count", 0)) > 1:
        return _join([_open_part(each) for each in _part_paths(path, parts)])
    return whole


def _open_part(path: Path) -> GGUFFile:
    cursor = Cursor(path.name, map_file(path))
    num_tensors, num_pairs = _read_header(cursor)
    metadata = _read_metadata(cursor, num_pairs)
    alignment = _alignment(cursor, metadata)
    entries = _read_tensor_table(cursor, num_tensors, alignment)
    data_begin = -(-cursor.position // alignment) * alignment
    _check_extents(cursor, entries, data_begin)
    everything = np.frombuffer(cursor.buffer, dtype=np.uint8)
    tensors = {}
    for entry in entries:
        begin = data_begin + entry.offset
        tensors[entry.name] = GGUFTensor(
            entry.name, entry.shape, entry.type, everything[begin : begin + entry.num_bytes]
        )
    return GGUFFile(path, MappingProxyType(metadata), MappingProxyType(tensors), (path,))


def _part_paths(path: Path, parts: int) -> list[Path]:
    """All parts of the model that `path` is one of, by its name. Each is there."""
    paths = [path.with_name(name) for name in part_names(path.name)]
    if len(paths) != parts:
        raise ModelFileError(
            f"{path.name}: one of {parts} parts of a split model, which must be called NAME-00001-of-{parts:05}.gguf "
            "and so on, and lie in one folder"
        )
    if missing := [each for each in paths if not each.is_file()]:
        raise ModelFileError(
            f"{path.name}: {len(missing)} of the model's {parts} parts are missing from its folder, the first of "
            f"them {missing[0].name}"
        )
    return paths


def _join(parts: list[GGUFFile]) -> GGUFFile:
    """The model whose metadata is in the first part and whose tensors are in all."""
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        for key, expected in (("split.no", number), ("split.count", len(parts))):
            if (found := _split_number(part, key, -1)) != expected:
                raise ModelFileError(f"{part.path.name}: metadata {key!r} is {found}, by its name it is {expected}")
        if twice := tensors.keys() & part.tensors.keys():
            raise ModelFileError(f"{part.path.name}: tensor {_short(min(twice))} is in an earlier part, too")
        tensors |= part.tensors
    expected = _split_number(parts[0], "split.tensors.count", 0)
    if len(tensors) != expected:
        raise ModelFileError(f"{parts[0].path.name}: the parts have {len(tensors)} tensors, and should have {expected}")
    first = parts[0]
    return GGUFFile(first.path, first.metadata, MappingProxyType(tensors), tuple(each.path for each in parts))


def _split_number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or not default <= value <= max(MAX_PARTS, MAX_TENSORS):
        raise ModelFileError(f"{file.path.name}: metadata {key!r} must be a count, got {str(value)[:80]}")
    return value


def _read_header(cursor: Cursor) -> tuple[int, int]:
    """The counts of tensors and metadata pairs."""
    magic = bytes(cursor.buffer[:4])
    if len(magic) == 4 and magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    begin = cursor.take(HEADER_BYTES, "the header")
    version, num_tensors, num_pairs = struct.unpack_from("<IQQ", cursor.buffer, begin + 4)
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise cursor.error("a big-endian file; only little-endian files are supported")
        raise cursor.error(f"GGUF version {version}; versions 2 and 3 are supported")
    _check_count(cursor, "metadata pairs", num_pairs, MAX_PAIRS, MIN_PAIR_BYTES)
    _check_count(cursor, "tensors", num_tensors, MAX_TENSORS, MIN_TENSOR_BYTES)
    return num_tensors, num_pairs


def _check_count(cursor: Cursor, what: str, count: int, most: int, least_bytes: int) -> None:
    if count > most:
        raise cursor.error(f"the header says {count} {what}; at most {most} are supported")
    left = cursor.size - cursor.position
    if count * least_bytes > left:
        raise cursor.error(
            f"incomplete file: {count} {what} need at least {count * least_bytes} bytes after the header, "
            f"the file has {left}"
        )


def _read_metadata(cursor: Cursor, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    items_left = MAX_ITEMS
    for index in range(num_pairs):
        key = cursor.string(f"the key of metadata pair {index} of {num_pairs}")
        what = f"metadata {_short(key)}"
        if key in metadata:
            raise cursor.error(f"{what} is there twice")
        metadata[key], items_left = _read_value(cursor, cursor.u32(what), what, items_left, MAX_DEPTH)
    return metadata


def _read_value(cursor: Cursor, type_id: int, what: str, items_left: int, depth: int) -> tuple[Any, int]:
    """One value, and how many array items the rest of the metadata may still have."""
    if type_id == STRING:
        return cursor.string(what), items_left
    if type_id != ARRAY:
        return _read_numbers(cursor, type_id, 1, what)[0], items_left
    item_type, count = cursor.u32(what), cursor.u64(what)
    if count > items_left:
        raise cursor.error(f"{what} is an array of {count} items; the file's arrays may have {MAX_ITEMS} in all")
    items_left -= count
    if item_type == STRING:
        return cursor.strings(count, what), items_left
    if item_type != ARRAY:
        return _read_numbers(cursor, item_type, count, what), items_left
    if depth == 1:
        raise cursor.error(f"{what} has arrays nested deeper than {MAX_DEPTH}")
    arrays = []
    for _ in range(count):
        array, items_left = _read_value(cursor, ARRAY, what, items_left, depth - 1)
        arrays.append(array)
    return arrays, items_left


def _read_numbers(cursor: Cursor, type_id: int, count: int, what: str) -> list[Any]:
    if type_id not in NUMBERS:
        raise cursor.error(f"{what} has value type {type_id}, which GGUF does not define")
    dtype = np.dtype(NUMBERS[type_id])
    begin = cursor.take(count * dtype.itemsize, what)
    values: list[Any] = np.frombuffer(cursor.buffer, dtype=dtype, count=count, offset=begin).tolist()
    if type_id != BOOL:
        return values
    if any(value > 1 for value in values):
        raise cursor.error(f"{what} is a bool of value {max(values)}; 0 and 1 are allowed")
    return [value == 1 for value in values]


def _alignment(cursor: Cursor, metadata: Mapping[str, Any]) -> int:
    """What tensor offsets are multiples of, in bytes."""
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(f"general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, got {str(value)[:80]}")
    return value


def _read_tensor_table(cursor: Cursor, num_tensors: int, alignment: int) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index} of {num_tensors}")
        if name in entries:
            raise cursor.error(f"tensor {_short(name)} is there twice")
        entries[name] = _read_tensor(cursor, name, alignment)
    return list(entries.values())


def _read_tensor(cursor: Cursor, name: str, alignment: int) -> _Entry:
    what = f"tensor {_short(name)}"
    num_dimensions = cursor.u32(what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    shape = tuple(reversed([cursor.u64(what) for _ in range(num_dimensions)]))
    if 0 in shape:
        raise cursor.error(f"{what} of shape {shape} has no values")
    kind = _tensor_type(cursor, cursor.u32(what), what)
    block_values, block_bytes = BLOCKS[kind]
    if shape[-1] % block_values:
        raise cursor.error(
            f"{what} has rows of {shape[-1]} values, not a multiple of the {block_values} in a block of {kind.name}"
        )
    offset = cursor.u64(what)
    if offset % alignment:
        raise cursor.error(f"{what} is at offset {offset}, not a multiple of the alignment {alignment}")
    return _Entry(name, shape, kind, offset, prod(shape) // block_values * block_bytes)


def _tensor_type(cursor: Cursor, type_id: int, what: str) -> GGMLType:
    if type_id not in GGMLType.__members__.values():
        raise cursor.error(f"{what} has type id {type_id}, which is not known")
    kind = GGMLType(type_id)
    if kind not in SUPPORTED:
        names = ", ".join(supported.name for supported in SUPPORTED)
        raise cursor.error(f"{what} is of type {kind.name}, which is not supported; supported are {names}")
    return kind


def _check_extents(cursor: Cursor, entries: list[_Entry], data_begin: int) -> None:
    """Every tensor inside the file and none over another. Python's integers do not wrap, so sums are what they say."""
    previous: _Entry | None = None
    for entry in sorted(entries, key=lambda entry: entry.offset):
        begin = data_begin + entry.offset
        end = begin + entry.num_bytes
        if end > cursor.size:
            raise cursor.error(
                f"incomplete file: tensor {_short(entry.name)} of shape {entry.shape} needs bytes {begin}..{end}, "
                f"the file has {cursor.size}"
            )
        if previous is not None and previous.offset + previous.num_bytes > entry.offset:
            raise cursor.error(
                f"tensor {_short(entry.name)} begins at byte {begin}, inside tensor {_short(previous.name)}, "
                f"which ends at {data_begin + previous.offset + previous.num_bytes}"
            )
        previous = entry


def _short(name: str, most: int = 80) -> str:
    """A name out of a file, fit for a message: quoted, control characters escaped, cut."""
    return repr(name if len(name) <= most else name[: most - 3] + "...")
