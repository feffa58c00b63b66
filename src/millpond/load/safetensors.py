"""A reader of safetensors files: config.json beside it, and every tensor as a view into the mapped file.

Layout: bytes of the header (uint64) | header (JSON: name -> dtype, shape, [begin, end] from the header's end) | data.
All of it is checked before a tensor is handed out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from millpond.errors import ModelFileError
from millpond.load.ggml_types import BLOCKS, GGMLType
from millpond.load.gguf import MAX_DIMENSIONS, MAX_TENSORS, GGUFTensor, map_file

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_CONFIG_BYTES = 10_000_000
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TYPES = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open file under the names of Hugging Face. metadata: its config.json, without what is null there."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Map a .safetensors file, or the one in a folder, and check all of it and the config.json beside it.

    Raises ModelFileError naming the file, the tensor and both numbers.
    """
    folder = path if path.is_dir() else path.parent
    weights = path if not path.is_dir() else folder / WEIGHTS
    if path.is_dir() and not weights.is_file():
        kind = f"{INDEX} names several files, which" if (folder / INDEX).is_file() else "a folder without that file"
        raise ModelFileError(f"{path.name} has no {WEIGHTS}; {kind} cannot be read")
    config = read_config(folder / CONFIG)
    return SafetensorsFile(weights, MappingProxyType(config), MappingProxyType(_read_tensors(weights)))


def read_config(path: Path) -> dict[str, Any]:
    """A config.json without its nulls. Raises ModelFileError where it is missing or not an object."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise ModelFileError(f"{path.name} is longer than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(text)
    except OSError as error:
        raise ModelFileError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFileError(f"{path.name} must be an object, got {type(config).__name__}")
    return {key: value for key, value in config.items() if value is not None}


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
        raise ModelFileError(f"{what} must have a shape and two data_offsets, got {str(entry)[:120]}")
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
