"""Packed weights on disk: written at the first start of a model, mapped at every later one.

    magic | bytes of the head, its CRC-32 | head (JSON) | padding to 2 MiB | the run of memory that the layers lie in

A file is used only where its key says that it was made from this model file by this code, and its checksums agree.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.matmul import MOST_OUTLIERS
from millpond.kernels.pack import size_side_by_side
from millpond.load.progress import Progress, ignore
from millpond.model.checkpoint import ModelFile
from millpond.model.config import ModelConfig
from millpond.model.weights import ModelWeights, assemble, layer_forms, linear_layers, load_weights
from millpond.source_hash import SOURCE_FOLDERS, source_hash

MAGIC = b"millpack"
PREFIX = struct.Struct("<8sII")
START = 2 << 20  # where the weights begin: on a huge page
MOST_HEAD_BYTES = START - PREFIX.size
PIECE = 8 << 20  # bytes under one checksum
CHECKERS = 4  # threads that sum them up
# Packing a smaller file is as quick as finding out whether it has been packed before.
LEAST_BYTES = 16 << 20
SAMPLES, SAMPLE_BYTES = 64, 4096  # what the key looks at in the model file, besides what the system says of it
STALE_SECONDS = 3600.0

Notify = Callable[[str], None]


class _Unusable(Exception):
    """Why a file of packed weights is not used."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Where the packed weights of one model are kept, and the key that says what they were made from."""

    file: ModelFile
    config: ModelConfig
    dtype: str
    quantize: str
    path: Path
    key: str
    notify: Notify

    def read(self) -> ModelWeights | None:
        """The weights with their outlier channels; None where they are not there, of another time, or damaged."""
        try:
            with self.path.open("rb", buffering=0) as source:
                return self._read(source)
        except FileNotFoundError:
            return None
        except (_Unusable, OSError, ValueError) as reason:
            self.notify(f"the packed weights of {self.file.path.name} cannot be used ({reason}); packing them again")
            return None

    def _read(self, source: BinaryIO) -> ModelWeights | None:
        head = _read_head(source)
        if head.get("key") != self.key:
            return None
        forms = layer_forms(self.file, linear_layers(self.file, self.config), self.dtype, self.quantize)
        room = _map(source, size_side_by_side(forms))
        if _checksums(room) != head.get("checksums"):
            raise _Unusable("it is damaged")
        weights = assemble(self.file, self.config, forms, room)
        return replace(weights, outliers=_checked_outliers(head.get("outliers"), weights))

    def write(self, weights: ModelWeights, outliers: Sequence[NDArray[np.int64]]) -> None:
        """Keep the weights for the next start. Where that fails, it is said and nothing is left behind."""
        head = {
            "key": self.key,
            "model": str(self.file.path.resolve()),
            "checksums": _checksums(weights.room),
            "outliers": [channels.tolist() for channels in outliers],
        }
        try:
            folder = self.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            remove_orphans(folder)
            if shutil.disk_usage(folder).free < 2 * weights.room.nbytes:
                raise OSError(f"{2 * weights.room.nbytes} bytes should be free in {folder}")
            _write_whole(self.path, json.dumps(head).encode(), weights.room)
        except OSError as error:
            self.notify(f"the packed weights are not kept, so the next start packs again: {error}")


def packed_weights(
    file: ModelFile,
    config: ModelConfig,
    dtype: str,
    kv_dtype: str,
    *,
    isa: str,
    folder: Path,
    notify: Notify,
    quantize: str = "off",
    progress: Progress = ignore,
) -> tuple[ModelWeights, Callable[[Sequence[NDArray[np.int64]]], None]]:
    """The weights, read where they have been packed before, and what to call with the outlier channels of all integer
    layers once they are known: it keeps newly packed weights, and does nothing for others. progress hears of weights
    that are packed."""

    def load() -> ModelWeights:
        return load_weights(file, config, dtype, quantize, progress)

    if sum(path.stat().st_size for path in file.paths) < LEAST_BYTES:
        return load(), lambda outliers: None
    path = packed_path(file.path, dtype, kv_dtype, folder, quantize)
    key = key_of(file.paths, dtype, kv_dtype, isa, config, quantize)
    place = PackedFile(file, config, dtype, quantize, path, key, notify)
    if (weights := place.read()) is not None:
        return weights, lambda outliers: None
    weights = load()
    return weights, lambda outliers: place.write(weights, outliers)


def packed_path(model: Path, dtype: str, kv_dtype: str, folder: Path, quantize: str) -> Path:
    """One for each model file, dtype, kv_dtype and quantize, so that what was packed from an older version of the file
    is replaced."""
    kinds = "-".join([dtype, *([] if kv_dtype == "auto" else [kv_dtype]), *([] if quantize == "off" else [quantize])])
    place = hashlib.sha256(os.fsencode(model.resolve())).hexdigest()[:12]
    name = model.stem if model.suffix == ".gguf" else model.resolve().parent.name  # there, every model has the same
    return folder / f"{name}-{kinds}-{place}.packed"


def key_of(models: Sequence[Path], dtype: str, kv_dtype: str, isa: str, config: ModelConfig, quantize: str) -> str:
    """What weights are packed from: the model's files, its figures (which may be in another file), the code that packs
    them, and what chooses the outlier channels, if any: a probe by these kernels through K/V of this type. A file is
    known by its size, its times and its inode, and by some of what is in it."""
    about = [model.stat() for model in models]
    seen = [(each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino) for each in about]
    parts = [config, dtype, kv_dtype, isa, quantize, seen]
    digest = hashlib.sha256(repr((source_hash((*SOURCE_FOLDERS, "load")), parts)).encode())
    for model, (size, *_) in zip(models, seen, strict=True):
        with model.open("rb") as source:
            for sample in range(SAMPLES):
                source.seek(sample * size // SAMPLES)
                digest.update(source.read(SAMPLE_BYTES))
    return digest.hexdigest()


def remove_orphans(folder: Path) -> None:
    """Delete packed weights whose model file is gone, and what an interrupted write has left."""
    for path in folder.glob("*.part"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
    for path in folder.glob("*.packed"):
        with contextlib.suppress(OSError, _Unusable):
            with path.open("rb") as source:
                model = _read_head(source).get("model")
            if isinstance(model, str) and not Path(model).exists():
                path.unlink()


def _read_head(source: BinaryIO) -> dict[str, Any]:
    prefix = source.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        raise _Unusable("it has been cut")
    magic, num_bytes, checksum = PREFIX.unpack(prefix)
    if magic != MAGIC or num_bytes > MOST_HEAD_BYTES:
        raise _Unusable("its first bytes are not those of packed weights")
    text = source.read(num_bytes)
    if zlib.crc32(text) != checksum:
        raise _Unusable("its head is damaged")
    head: dict[str, Any] = json.loads(text)
    return head


def _map(source: BinaryIO, size: int) -> NDArray[np.uint8]:
    """The weights as read-only memory, shared by all processes that map them, in huge pages where the system can."""
    if os.fstat(source.fileno()).st_size != START + size:
        raise _Unusable("it has been cut")
    mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8, size, START)


def _checksums(room: NDArray[np.uint8]) -> list[int]:
    """The CRC-32 of each piece; the threads read from disk, too, what is not in memory yet."""
    pieces = [room[start : start + PIECE] for start in range(0, room.nbytes, PIECE)]
    with ThreadPoolExecutor(CHECKERS) as checkers:
        return list(checkers.map(zlib.crc32, pieces))


def _checked_outliers(listed: Any, weights: ModelWeights) -> tuple[NDArray[np.int64], ...]:
    """The channels of each integer layer; compiled code reads memory by them, so they are looked at once more."""
    layers = weights.integer_layers
    outliers = tuple(np.array(channels, np.int64) for channels in listed)
    for layer, channels in zip(layers, outliers, strict=True):
        if len(channels) > MOST_OUTLIERS or any(not 0 <= channel < layer.depth for channel in channels):
            raise _Unusable("it names channels that its layers do not have")
    return outliers


def _write_whole(path: Path, head: bytes, room: NDArray[np.uint8]) -> None:
    """The file, or nothing: it gets its name when all of it is there."""
    handle, temporary = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as target:
            target.write(PREFIX.pack(MAGIC, len(head), zlib.crc32(head)) + head)
            target.seek(START)
            target.write(memoryview(room))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
