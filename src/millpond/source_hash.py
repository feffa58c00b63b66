"""Which version of the sources this is, for whatever was made by them and is kept: it is used by no other version."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

SOURCE_FOLDERS = ("kernels", "model", "runner")
COMPILERS = ("numba", "llvmlite", "numpy")


def source_hash(folders: tuple[str, ...] = SOURCE_FOLDERS) -> str:
    """Hash of every source in the folders, by default of all that ends up in compiled code, and of the versions that
    compile it. Imports none of them."""
    package = Path(__file__).parent
    digest = hashlib.sha256(" ".join(map(metadata.version, COMPILERS)).encode())
    for folder in folders:
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kernels_below(cache_folder: Path) -> Path:
    """The folder for the kernels that these sources compile to.

    Numba does not rebuild a cached function when a callee in another file or the code of an intrinsic changes, so each
    version has its own.
    """
    return cache_folder / "kernels" / source_hash()
