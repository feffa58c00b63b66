"""Where compiled kernels are kept: one folder per version of the sources, of Numba and of llvmlite.

Numba does not rebuild a cached function when a callee in another file or the code of an intrinsic
changes, so the folder's name is a hash over all of them.
"""

import hashlib
import tempfile
from pathlib import Path

import llvmlite
import numba
import numpy
import platformdirs

SOURCE_FOLDERS = ("kernels", "model", "runner")


def source_hash(folders: tuple[str, ...] = SOURCE_FOLDERS) -> str:
    """Hash of every source in the folders, by default of all that ends up in compiled code, and of the versions that
    compile it."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {numpy.__version__}".encode())
    for folder in folders:
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """The folder for this version's kernels under the user's cache folder."""
    return Path(platformdirs.user_cache_dir("millpond")) / "kernels" / source_hash()


def use_cache_folder() -> None:
    """Point Numba at the cache folder, or at a temporary one where it cannot be written; a user's setting wins."""
    if numba.config.CACHE_DIR:
        return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        # a new folder, since compiled code is loaded from it: one that was there may be another user's
        folder = Path(tempfile.mkdtemp(prefix="millpond-kernels-"))
    numba.config.CACHE_DIR = str(folder)


def folder_in_use() -> Path:
    """Where compiled code is kept in this process."""
    return Path(numba.config.CACHE_DIR)
