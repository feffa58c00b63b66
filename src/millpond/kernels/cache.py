"""Where compiled kernels are kept: in the user's cache folder, or where NUMBA_CACHE_DIR says."""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numba
import platformdirs

from millpond.source_hash import kernels_below


def use_cache_folder() -> None:
    """Point Numba at the cache folder, a user's own if one is set. Where it cannot be written, that is said, and a
    temporary one serves until the process ends."""
    folder = Path(numba.config.CACHE_DIR or kernels_below(platformdirs.user_cache_path("millpond")))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        folder = _temporary()
        reason = f"compiled kernels cannot be kept, so every start compiles them: {error}"
        print(f"millpond: {reason} (MILLPOND_CACHE names another folder)", file=sys.stderr)
    numba.config.CACHE_DIR = str(folder)


def _temporary() -> Path:
    """A new folder, since compiled code is loaded from it: one that was there may be another user's."""
    folder, owner = Path(tempfile.mkdtemp(prefix="millpond-kernels-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a child's
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def folder_in_use() -> Path:
    """Where compiled code is kept in this process."""
    return Path(numba.config.CACHE_DIR)
