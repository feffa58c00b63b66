"""A reader of safetensors files: config.json beside them, and every tensor as a view into a mapped file.

Layout: bytes of the header (uint64) | header (JSON: name -> dtype, shape, [begin, end] from the header's end) | data.
All of it is checked before a tensor is handed out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from millpond.errors import ModelFileError, shown
from millpond.load.dequantize import Tensor
from millpond.load.ggml_types import BLOCKS, GGMLType
from millpond.load.gguf import MAX_DIMENSIONS, MAX_TENSORS, GGUFTensor
from millpond.load.mapped import map_file

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_CONFIG_BYTES = 10_000_000
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.safetensors", re.ASCII)
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000
# Integers are parts of quantised weights (quantization_config.py).
TYPES = {name: GGMLType[name] for name in ("F32", "F16", "BF16", "I8", "I32", "I64")}


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open checkpoint under the names of Hugging Face. metadata: its config.json, without what is null there.

    path: the file, or the index of several; paths: all files with tensors.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    paths: tuple[Path, ...]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Map a .safetensors file, or the one in a folder, or all that an index names, and check them and config.json.

    A file that an index beside it names is opened with the others. Raises ModelFileError naming the file, the tensor
    and both numbers.
    """
    folder = path if path.is_dir() else path.parent
    config = MappingProxyType(read_json(folder / CONFIG, MAX_CONFIG_BYTES))
    whole = folder / WEIGHTS if path.is_dir() else path
    if whole.is_file() and whole.name == WEIGHTS:
        return SafetensorsFile(whole, config, MappingProxyType(_read_tensors(whole)), (whole,))
    if (folder / INDEX).is_file():
        places = _read_index(folder / INDEX)
        if path.is_dir() or path.name in places.values():
            return _open_shards(folder, config, places)
    if path.is_dir():
        raise ModelFileError(f"{path.name} has no {WEIGHTS}, and no {INDEX} that names several files")
    return SafetensorsFile(path, config, MappingProxyType(_read_tensors(path)), (path,))


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, in the index's folder."""
    places = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places or len(places) > MAX_TENSORS:
        raise ModelFileError(f"{path.name}: weight_map must be an object of 1 to {MAX_TENSORS} tensors")
    for name, file in places.items():
        if not isinstance(file, str) or not SHARD.fullmatch(file):
            raise ModelFileError(
                f"{path.name}: tensor {name[:80]!r} is said to be in {str(file)[:80]!r}, which is no .safetensors file "
                "of the same folder"
            )
    return places


def _open_shards(folder: Path, config: Mapping[str, Any], places: dict[str, str]) -> SafetensorsFile:
    files = sorted(set(places.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ModelFileError(
            f"{INDEX} names {len(files)} files, and {len(missing)} are missing, the first {missing[0]}"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = _read_tensors(folder / file)
        for name in found:
            if places.get(name) != file:
                where = f"in {places[name]}" if name in places else "nowhere"
                raise ModelFileError(f"{file}: tensor {name[:80]!r} is here, and by {INDEX} it is {where}")
        tensors |= found
    if missing := sorted(places.keys() - tensors.keys()):
        raise ModelFileError(f"{places[missing[0]]}: tensor {missing[0][:80]!r} is missing, which {INDEX} says is here")
    paths = tuple(folder / file for file in files)
    return SafetensorsFile(folder / INDEX, config, MappingProxyType(tensors), paths)


def read_json(path: Path, most_bytes: int, name: str | None = None) -> dict[str, Any]:
    """A JSON object without its nulls. Raises ModelFileError where it is missing, too long or not an object; name is
    what it is called there."""
    name = name or path.name
    found = _read_value(path, most_bytes, name)
    if not isinstance(found, dict):
        raise ModelFileError(f"{name} must be an object, got {type(found).__name__}")
    return {key: value for key, value in found.items() if value is not None}


def read_json_list(path: Path, most_bytes: int) -> list[Any]:
    """A JSON list. Raises ModelFileError where it is missing, too long or not a list."""
    found = _read_value(path, most_bytes, path.name)
    if not isinstance(found, list):
        raise ModelFileError(f"{path.name} must be a list, got {type(found).__name__}")
    return found


def _read_value(path: Path, most_bytes: int, name: str) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(most_bytes + 1)
        if len(text) > most_bytes:
            raise ModelFileError(f"{name} is longer than {most_bytes} bytes")
        return json.loads(text)
    except OSError as error:
        raise ModelFileError(f"{name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{name} is not JSON: {error}") from error


def _read_tensors(path: Path) -> dict[str, GGUFTensor]:
    buffer = np.frombuffer(map_file(path), np.uint8)
    header, begin = _read_header(path.name, buffer)
    tensors, ends = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, first, last = _checked(path.name, name, entry, buffer.size - begin)
        tensors[name] = GGUFTensor(name, shape, kind, buffer[begin + first : begin + last])
        ends.append((first, last, name))
    ends.sort()
    for (_, last, before), (first, _, name) in pairwise(ends):
        if first < last:
            raise ModelFileError(f"{path.name}: tensor {name!r} begins at {first}, inside {before!r}, ends at {last}")
    return tensors


def _read_header(name: str, buffer: np.ndarray) -> tuple[dict[str, Any], int]:
    """The header, and where the data begins."""
    if buffer.size < PREFIX_BYTES:
        raise ModelFileError(f"{name}: incomplete file: it has {buffer.size} bytes, its first number takes 8")
    size = int.from_bytes(buffer[:PREFIX_BYTES].tobytes(), "little")
    if size > min(MAX_HEADER_BYTES, buffer.size - PREFIX_BYTES):
        raise ModelFileError(
            f"{name}: incomplete file, or not safetensors: a header of {size} bytes in a file of {buffer.size}"
        )
    try:
        header = json.loads(
            buffer[PREFIX_BYTES : PREFIX_BYTES + size].tobytes(), object_pairs_hook=lambda pairs: _unique(name, pairs)
        )
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{name}: the header is not JSON: {error}") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ModelFileError(f"{name}: the header must be an object of at most {MAX_TENSORS} tensors")
    return header, PREFIX_BYTES + size


def _unique(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key in found if sum(other == key for other, _ in pairs) > 1)
        raise ModelFileError(f"{name}: {twice[:80]!r} is there twice")
    return found


def _checked(file: str, name: str, entry: Any, size: int) -> tuple[GGMLType, tuple[int, ...], int, int]:
    """One entry's type, shape and extent, inside `size` bytes of data."""
    what = f"{file}: tensor {name[:80]!r}"
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets = (_whole_numbers(fields.get(key)) for key in ("shape", "data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise ModelFileError(f"{what} must have a shape and two data_offsets, got {shown(entry)}")
    kind = TYPES.get(str(fields.get("dtype")))
    if kind is None:
        raise ModelFileError(
            f"{what} is of type {str(fields.get('dtype'))[:40]!r}, which is not supported; "
            f"supported are {', '.join(TYPES)}"
        )
    first, last = offsets
    needed = prod(shape) * BLOCKS[kind][1]
    if last - first != needed:
        raise ModelFileError(f"{what} of shape {shape} takes {needed} bytes, its offsets span {last - first}")
    if last > size:
        raise ModelFileError(f"{file}: incomplete file: tensor {name[:80]!r} ends at byte {last} of {size}")
    return kind, shape, first, last


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    """A list of numbers from 0 on; None for anything else."""
    is_one = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    return tuple(value) if is_one else None
