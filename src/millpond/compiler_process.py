"""The process that compiles beside this one. It may be started before anything that compiles is imported here, so this
imports nothing that takes time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millpond.machine import usable_cores

# It imports from where this process does, and keeps what it compiles in the same folder. It ends without taking down
# what it has in memory, for which this process would wait.
START = "; ".join(
    [
        "import os, sys",
        "sys.path[:] = sys.argv[2:]",
        "import numba",
        "numba.config.CACHE_DIR = sys.argv[1]",
        "from millpond.kernels.precompile import take_jobs",
        "import millpond.runner.compiled",
        "take_jobs(sys.stdin.buffer, sys.stdout.buffer)",
        "os._exit(0)",
    ]
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A process that takes jobs (kernels/precompile.py) and keeps what it compiles in a folder."""

    process: subprocess.Popen[bytes]
    folder: Path


def start_compiler(folder: Path) -> Compiler | None:
    """Start one, where there is a core for it and a process can be had."""
    if usable_cores() < 2 or not sys.executable:
        return None
    command = [sys.executable, "-c", START, str(folder), *sys.path]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    return Compiler(process, folder)


def marks_in(folder: Path) -> Path:
    """Where a folder of compiled code says what has been compiled."""
    return folder / "compiled"


@contextlib.contextmanager
def compiler_for_first_start(folder: Path) -> Iterator[Compiler | None]:
    """One that imports what it needs while this process does, where nothing has been compiled in the folder yet; None
    elsewhere. It ends with the `with` block."""
    compiler = None if marks_in(folder).exists() else start_compiler(folder)
    try:
        yield compiler
    finally:
        if compiler is not None:
            with compiler.process as process:
                process.kill()
