"""What the cache lacks is compiled ahead, by two processes where there are cores for them, and by one at a time.

The other process is given a job when it is done with the one before. All signatures of a function are one job: Numba's
index of a function's compiled code would lose an entry if two processes wrote it at once.
"""

import contextlib
import gc
import hashlib
import pickle
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import llvmlite.binding as llvm
from filelock import FileLock, Timeout
from numba import njit

from millpond.compiler_process import Compiler, marks_in, start_compiler
from millpond.kernels.cache import folder_in_use

Notify = Callable[[str], None]
DONE = b"."
# To start the other process costs as much as a small job.
LEAST_JOBS = 3
LONGEST_WAIT = 300.0  # seconds
UNKEPT = "compiled kernels cannot be kept in {}, so every start compiles them: {}"


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
    with compiling(jobs, notify):
        pass


@contextlib.contextmanager
def compiling(jobs: Sequence[Job], notify: Notify, compiler: Compiler | None = None) -> Iterator[None]:
    """compile_missing, of which the other process does what it can while this one does what is in the `with` block.
    compiler: one that was started before, to be taken for it if it keeps things where this process does."""
    marks = marks_in(folder_in_use())
    if not _missing(jobs, marks):
        yield
        return
    with contextlib.ExitStack() as stack:
        finish = _begin(jobs, marks, stack, notify, compiler)
        yield
        try:
            finish()
        except OSError as error:
            notify(UNKEPT.format(marks.parent, error))


def _begin(
    jobs: Sequence[Job], marks: Path, stack: contextlib.ExitStack, notify: Notify, compiler: Compiler | None
) -> Callable[[], None]:
    """Have the other process begin, unless one that was started by somebody else has begun already; the stack ends it.
    Returns what does the rest of the jobs."""
    lock = FileLock(marks / "lock")
    try:
        marks.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        return lambda: _after_another(jobs, marks, lock, notify)
    except OSError as error:
        notify(UNKEPT.format(marks.parent, error))
        return lambda: None
    stack.callback(lock.release)
    notify("compiling kernels for this processor (once for each kind of model; ten seconds or more) ...")
    waiting = deque(_missing(jobs, marks))
    if len(waiting) >= LEAST_JOBS:
        if compiler is None or compiler.folder != folder_in_use():
            compiler = start_compiler(folder_in_use())
        if compiler is not None:
            stack.enter_context(_shared(waiting, marks, compiler.process))
    return lambda: _work_off(waiting, marks)


def _missing(jobs: Sequence[Job], marks: Path) -> list[Job]:
    return [job for job in jobs if not (marks / job.mark()).exists()]


def _after_another(jobs: Sequence[Job], marks: Path, lock: FileLock, notify: Notify) -> None:
    """Wait for the process that compiles, and do what it has left. One that keeps the lock for ever is no longer waited
    for."""
    notify("another process is compiling kernels for this processor; waiting for it ...")
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=LONGEST_WAIT)
    try:
        _work_off(deque(_missing(jobs, marks)), marks)
    finally:
        lock.release()


def _work_off(waiting: deque[Job], marks: Path) -> None:
    while (job := _next(waiting)) is not None:
        job.compile()
        (marks / job.mark()).touch()


def _next(waiting: deque[Job]) -> Job | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


@contextlib.contextmanager
def _shared(waiting: deque[Job], marks: Path, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Have another process work at the jobs, until there are none. If it fails, its job is back among those waiting."""
    with process:
        feeder = Thread(target=_feed, args=(process, waiting, marks))
        feeder.start()
        try:
            yield
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
    """The other process: compile each job that comes in, and say so, until no more come. Nothing that it makes is
    garbage before it ends. Numba gets ready with what it compiles first, so that is nothing, before a job has come."""
    gc.disable()
    njit(lambda: None).compile(())
    while True:
        try:
            job: Job = pickle.load(source)
        except EOFError:
            return
        job.compile()
        target.write(DONE)
        target.flush()
