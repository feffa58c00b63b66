"""The two sides of a comparison, each a folder of sources with a kernel cache of its own, and their runs."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.compare.verdict import rows_of

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 5


class CompareError(Exception):
    """What keeps the comparison from being made, in one line."""


@dataclass(frozen=True, slots=True)
class Side:
    """One version of the sources: its name in the table, and the folder that holds src/ and the kernel cache."""

    name: str
    folder: Path

    def environment(self) -> dict[str, str]:
        """Its own sources before any installed ones, its own compiled kernels, and the same hashes in every run."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.folder / "src"),
            "NUMBA_CACHE_DIR": str(self.folder / "kernels"),
            "PYTHONHASHSEED": "0",
        }

    def run(self, *arguments: str) -> str:
        """What a Python process prints that sees these sources. Raises CompareError with its last lines."""
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self.environment(), capture_output=True, text=True)
        if done.returncode:
            said = " | ".join(done.stderr.strip().splitlines()[-LAST_LINES:])
            raise CompareError(f"{self.name}: {' '.join(arguments)} ended with {done.returncode}: {said}")
        return done.stdout

    def check(self) -> None:
        """Raises CompareError where this folder's sources are not the ones that a run would import."""
        found = Path(self.run("-c", "import millpond; print(millpond.__file__)").strip())
        if self.folder.resolve() not in found.resolve().parents:
            raise CompareError(f"{self.name}: its runs would import {found}, not the sources in {self.folder}")

    def bench(self, rows: Rows, extra: Sequence[str] = ()) -> dict[str, float]:
        """Tokens per second by row, from one process."""
        return rows_of(json.loads(self.run("-m", "millpond.cli", "bench", "engine", *rows.arguments(), *extra)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of `bench engine` are compared."""

    model: str
    decode: str
    prefill: str
    w1: bool

    def arguments(self) -> list[str]:
        choice = ["--decode", self.decode, "--prefill", self.prefill, "--w1" if self.w1 else "--no-w1"]
        return ["--model", self.model, *choice, "--rounds", "1", "--json"]

    def each(self) -> list[tuple[str, Rows]]:
        """The rows one by one, by their names."""
        decode = [(f"decode {n}", Rows(self.model, n, "", False)) for n in self.decode.split(",") if n]
        prefill = [(f"prefill {n}", Rows(self.model, "", n, False)) for n in self.prefill.split(",") if n]
        return decode + prefill + ([("W1", Rows(self.model, "", "", True))] if self.w1 else [])

    def none(self) -> Rows:
        """The same command with nothing to measure: what starting up takes."""
        return Rows(self.model, "", "", False)


def git(*arguments: str, root: Path = ROOT) -> bytes:
    """What git prints. Raises CompareError with the last thing that it says."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise CompareError(said[-1] if said else f"git {arguments[0]} ended with {done.returncode}")
    return done.stdout


def commit_of(name: str, root: Path = ROOT) -> str:
    """The full hash of a commit, by any of its names. Raises CompareError where there is none."""
    try:
        found = git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}", root=root)
    except CompareError as error:
        raise CompareError(f"there is no commit {name!r} ({error})") from error
    return found.decode().strip()


def side_of_commit(commit: str, folder: Path, root: Path = ROOT) -> Side:
    """A commit's sources, written into the folder; the repository keeps no trace of it, as of a worktree it would."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit, "src", root=root))) as archive:
        archive.extractall(folder, filter="data")
    return Side("base", folder)


def side_of_working_tree(folder: Path, root: Path = ROOT) -> Side:
    """A copy of the working tree's sources as they are now: work may go on while they are measured."""
    shutil.copytree(root / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return Side("new", folder)
