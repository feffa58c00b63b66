"""What the cache lacks is compiled ahead, by two processes where there are cores for them, and by one at a time.

The other process is given a job when it is done with the one before. All signatures of a function are one job: Numba's
index of a function's compiled code would lose an entry if two processes wrote it at once.
"""

import contextlib
import hashlib
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import llvmlite.binding as llvm
from filelock import FileLock, Timeout

from millpond.kernels.cache import folder_in_use
from millpond.kernels.threads import usable_cores

Notify = Callable[[str], None]
DONE = b"."
# To start the other process costs as much as a small job.
LEAST_JOBS = 3
LONGEST_WAIT = 300.0  # seconds
# The other process imports from where this one does, and keeps what it compiles where this one does.
START = "; ".join(
    [
        "import sys, numba",
        "sys.path[:] = sys.argv[2:]",
        "numba.config.CACHE_DIR = sys.argv[1]",
        "from millpond.kernels.precompile import take_jobs",
        "take_jobs(sys.stdin.buffer, sys.stdout.buffer)",
    ]
)


@dataclass(frozen=True, slots=True)
class Job:
    """A jitted function of a module, by its name, and the Numba types of the arguments of each version of it."""

    module: str
    name: str
    signatures: tuple[tuple[Any, ...], ...]

    def compile(self) -> None:
        """Compile what this process does not have and the cache does not hold."""
        dispatcher = getattr(import_module(self.module), self.name)
        for signature in self.signatures:
            dispatcher.compile(signature)

    def mark(self) -> str:
        """A name for what is compiled here, on this processor."""
        processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        about = self.module, self.name, sorted(map(str, self.signatures)), processor
        return hashlib.sha256(repr(about).encode()).hexdigest()[:24]


@dataclass(slots=True)
class Wanted:
    """Stands in for entry_point: notes what is to be compiled, in the order of the calls, and gives no address."""

    _signatures: dict[tuple[str, str], list[tuple[Any, ...]]] = field(default_factory=dict)

    def __call__(self, dispatcher: Any, *argument_types: Any) -> int:
        name = dispatcher.__module__, dispatcher.__name__
        self._signatures.setdefault(name, []).append(argument_types)
        return 0

    def jobs(self) -> list[Job]:
        return [Job(*name, tuple(signatures)) for name, signatures in self._signatures.items()]


def compile_missing(jobs: Sequence[Job], notify: Notify) -> None:
    """See to it that the cache holds all of this; the jobs are taken in this order, so the longest should be first.

    What is there is marked by a file, so that this takes no time at later starts.
    """
    marks = folder_in_use() / "compiled"
    if not _missing(jobs, marks):
        return
    try:
        marks.mkdir(parents=True, exist_ok=True)
        with _alone(FileLock(marks / "lock"), notify):
            _compile_all(_missing(jobs, marks), marks)
    except OSError as error:
        notify(f"compiled kernels cannot be kept in {marks.parent}, so every start compiles them: {error}")


def _missing(jobs: Sequence[Job], marks: Path) -> list[Job]:
    return [job for job in jobs if not (marks / job.mark()).exists()]


@contextlib.contextmanager
def _alone(lock: FileLock, notify: Notify) -> Iterator[None]:
    """Hold the lock: what the process that had it has compiled need not be compiled again. One that keeps it for ever
    is no longer waited for."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        notify("another process is compiling kernels for this processor; waiting for it ...")
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=LONGEST_WAIT)
    try:
        yield
    finally:
        lock.release()


def _compile_all(jobs: Sequence[Job], marks: Path) -> None:
    waiting = deque(jobs)
    if len(jobs) >= LEAST_JOBS and usable_cores() > 1 and sys.executable:
        _share(waiting, marks)
    _work_off(waiting, marks)


def _work_off(waiting: deque[Job], marks: Path) -> None:
    while (job := _next(waiting)) is not None:
        job.compile()
        (marks / job.mark()).touch()


def _next(waiting: deque[Job]) -> Job | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _share(waiting: deque[Job], marks: Path) -> None:
    """Work off the jobs together with another process. If that one fails, its job is back among those waiting."""
    command = [sys.executable, "-c", START, str(folder_in_use()), *sys.path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with contextlib.suppress(OSError), subprocess.Popen(command, **pipes) as process:
        feeder = Thread(target=_feed, args=(process, waiting, marks))
        feeder.start()
        try:
            _work_off(waiting, marks)
        except BaseException:
            process.kill()
            raise
        finally:
            feeder.join()


def _feed(process: subprocess.Popen[bytes], waiting: deque[Job], marks: Path) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    while (job := _next(waiting)) is not None:
        try:
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            is_done = process.stdout.read(1) == DONE
        except OSError:
            is_done = False
        if not is_done:
            waiting.appendleft(job)
            process.kill()
            break
        (marks / job.mark()).touch()
    with contextlib.suppress(OSError):  # what a process that is gone has not read
        process.stdin.close()


def take_jobs(source: BinaryIO, target: BinaryIO) -> None:
    """The other process: compile each job that comes in, and say so, until no more come."""
    while True:
        try:
            job: Job = pickle.load(source)
        except EOFError:
            return
        job.compile()
        target.write(DONE)
        target.flush()
