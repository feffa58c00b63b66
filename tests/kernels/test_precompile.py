"""What the cache lacks is compiled by two processes, once, and by this one alone where the other cannot."""

import contextlib
import importlib
import io
import pickle
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest
from filelock import FileLock
from numba import types

from millpond import compiler_process
from millpond.compiler_process import Compiler, start_compiler
from millpond.kernels import precompile
from millpond.kernels.precompile import DONE, Job, Wanted, compile_missing, compiling, take_jobs

NAMES = ("one", "two", "three", "four")
SOURCE = "from numba import njit\n\n" + "\n".join(
    f"@njit(cache=True)\ndef {name}(x):\n    return x + {number}\n\n" for number, name in enumerate(NAMES)
)
TOLD = "compiling kernels for this processor (once for each kind of model; ten seconds or more) ..."
INTEGER, REAL = (types.int64,), (types.float64,)


class Made:
    """A module of four functions, the folder that they are cached in, and what was told."""

    def __init__(self, folder):
        self.module = importlib.import_module("to_be_compiled")
        self.marks = folder / "compiled"
        self.told = []

    def job(self, name, *signatures):
        return Job("to_be_compiled", name, signatures or (INTEGER,))

    def compile(self, *jobs):
        compile_missing(jobs or [self.job(name) for name in NAMES], self.told.append)

    def compiled(self, name):
        """How many versions of a function this process has, and how many of them came from the cache."""
        dispatcher = getattr(self.module, name)
        return len(dispatcher.overloads), sum(dispatcher.stats.cache_hits.values())


@pytest.fixture
def made(tmp_path, monkeypatch):
    (tmp_path / "to_be_compiled.py").write_text(SOURCE)
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler_process, "usable_cores", lambda: 2)
    yield Made(folder)
    sys.modules.pop("to_be_compiled")


@pytest.fixture
def no_other(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("another process was started"))


def test_what_was_compiled_once_is_not_compiled_again(made, no_other, monkeypatch):
    made.compile(made.job("one"))
    assert made.compiled("one") == (1, 0)
    monkeypatch.setattr(Job, "compile", lambda job: pytest.fail("compiled again"))
    made.compile(made.job("one"))


def test_only_what_is_missing_is_compiled(made, no_other, monkeypatch):
    made.compile(made.job("one"))
    compiled = []
    monkeypatch.setattr(Job, "compile", lambda job: compiled.append(job.name))
    made.compile(made.job("two"), made.job("one"), made.job("three"))
    assert compiled == ["two", "three"]


def test_the_other_process_compiles_into_the_same_cache(made, monkeypatch):
    own = Job.compile
    monkeypatch.setattr(Job, "compile", lambda job: own(job) if job.name == "one" else pytest.fail("not left to it"))
    take, first_is_taken = precompile._next, threading.Event()

    def first_here_others_there(waiting):
        if threading.current_thread() is not threading.main_thread():
            assert first_is_taken.wait(60)
            return take(waiting)
        if first_is_taken.is_set():
            return None
        job = take(waiting)
        first_is_taken.set()
        return job

    monkeypatch.setattr(precompile, "_next", first_here_others_there)
    made.compile()
    assert {made.job(name).mark() for name in NAMES} < {path.name for path in made.marks.iterdir()}
    monkeypatch.setattr(Job, "compile", own)
    for name in NAMES[1:]:
        made.job(name).compile()
        assert made.compiled(name) == (1, 1), "it was not in the cache"
    assert made.told == [TOLD]


def test_the_other_process_is_at_work_while_this_one_does_something_else(made, monkeypatch):
    """This one waits, in its `with` block, until all is compiled."""
    monkeypatch.setattr(Job, "compile", lambda job: pytest.fail("not left to it"))
    jobs = [made.job(name) for name in NAMES]
    last, done = precompile._feed, threading.Event()
    monkeypatch.setattr(precompile, "_feed", lambda *arguments: last(*arguments) or done.set())
    with compiling(jobs, made.told.append):
        assert made.told == [TOLD], "it is told before it begins"
        assert done.wait(120)
        assert {job.mark() for job in jobs} < {path.name for path in made.marks.iterdir()}


def test_a_process_that_was_started_before_is_the_other_one(made, monkeypatch):
    compiler = start_compiler(made.marks.parent)
    monkeypatch.setattr(precompile, "start_compiler", lambda folder: pytest.fail("another was started"))
    monkeypatch.setattr(Job, "compile", lambda job: pytest.fail("not left to it"))
    last, done = precompile._feed, threading.Event()
    monkeypatch.setattr(precompile, "_feed", lambda *arguments: last(*arguments) or done.set())
    jobs = [made.job(name) for name in NAMES]
    with compiling(jobs, made.told.append, compiler):
        assert done.wait(120)
    assert compiler.process.returncode == 0
    assert {job.mark() for job in jobs} < {path.name for path in made.marks.iterdir()}


def test_one_that_keeps_things_elsewhere_is_not_taken(made, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(precompile, "start_compiler", asked.append)
    with compiling([made.job(name) for name in NAMES], made.told.append, Compiler(None, tmp_path / "elsewhere")):
        assert asked == [made.marks.parent]
    assert made.compiled("four") == (1, 0)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_what_goes_wrong_meanwhile_ends_the_other_process_and_lets_the_next_one_in(made, fault):
    threads = threading.active_count()
    with pytest.raises(fault), compiling([made.job(name) for name in NAMES], made.told.append):
        raise fault
    assert threading.active_count() == threads
    with FileLock(made.marks / "lock", timeout=0):
        pass


@pytest.mark.parametrize(
    "start", ["import nothing_of_that_name", "print('hello', flush=True)", "import os; os._exit(0)"]
)
def test_where_the_other_process_fails_this_one_does_all_the_work(made, monkeypatch, start):
    monkeypatch.setattr(compiler_process, "START", start)
    made.compile()
    assert [made.compiled(name) for name in NAMES] == [(1, 0)] * 4
    assert len(list(made.marks.iterdir())) >= 4


def test_few_jobs_are_not_worth_another_process(made, no_other):
    made.compile(made.job("one"), made.job("two"))
    assert made.compiled("two") == (1, 0)


def test_with_one_core_there_is_no_other_process(made, no_other, monkeypatch):
    monkeypatch.setattr(compiler_process, "usable_cores", lambda: 1)
    made.compile()
    assert made.compiled("four") == (1, 0)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError])
def test_a_fault_here_ends_the_other_process_too(made, monkeypatch, fault):
    started, threads = [], threading.active_count()
    popen = subprocess.Popen

    def remember(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    def compile_nothing(job):
        raise fault

    monkeypatch.setattr(subprocess, "Popen", remember)
    monkeypatch.setattr(Job, "compile", compile_nothing)
    with pytest.raises(fault):
        made.compile()
    assert started[0].returncode != 0
    assert threading.active_count() == threads


def test_a_job_that_cannot_be_compiled_says_why(made, no_other):
    with pytest.raises(numba.core.errors.TypingError):
        made.compile(made.job("one", (types.unicode_type,)))


def test_what_another_process_is_compiling_is_waited_for_and_not_compiled_twice(made, monkeypatch):
    monkeypatch.setattr(Job, "compile", lambda job: pytest.fail("compiled twice"))
    made.marks.mkdir()
    heard = threading.Event()
    jobs = [made.job(name) for name in NAMES]
    with FileLock(made.marks / "lock"):
        waiting = threading.Thread(
            target=compile_missing, args=(jobs, lambda line: made.told.append(line) or heard.set())
        )
        waiting.start()
        assert heard.wait(60)
        for job in jobs:
            (made.marks / job.mark()).touch()
    waiting.join(60)
    assert not waiting.is_alive()
    assert made.told == ["another process is compiling kernels for this processor; waiting for it ..."]


def test_a_process_that_never_lets_go_is_not_waited_for_for_ever(made, no_other, monkeypatch):
    monkeypatch.setattr(precompile, "LONGEST_WAIT", 0.0)
    made.marks.mkdir()
    with FileLock(made.marks / "lock"):
        made.compile(made.job("one"))
    assert made.compiled("one") == (1, 0)
    assert len(made.told) == 1


@pytest.mark.parametrize("fault", [None, ValueError])
def test_the_next_process_is_let_in_when_the_work_is_done_or_has_failed(made, no_other, monkeypatch, fault):
    locks = []
    monkeypatch.setattr(precompile, "FileLock", lambda path: locks.append(FileLock(path)) or locks[-1])
    if fault:
        monkeypatch.setattr(Job, "compile", lambda job: (_ for _ in ()).throw(fault))
    with contextlib.nullcontext() if fault is None else pytest.raises(fault):
        made.compile(made.job("one"))
    assert not locks[0].is_locked
    with FileLock(made.marks / "lock", timeout=0):
        pass


def test_a_cache_that_cannot_be_written_costs_a_notice(made):
    made.marks.write_text("not a folder")
    made.compile()
    assert "cannot be kept" in made.told[0]


def test_a_cache_that_vanishes_while_it_is_filled_costs_a_notice(made, no_other, monkeypatch):
    monkeypatch.setattr(precompile, "_work_off", lambda waiting, marks: (marks / "gone" / "mark").touch())
    made.compile(made.job("one"))
    assert "cannot be kept" in made.told[-1]


def test_all_versions_of_a_function_are_one_job_in_the_order_of_the_calls(made):
    wanted = Wanted()
    assert [wanted(made.module.two, *INTEGER), wanted(made.module.one, *REAL), wanted(made.module.two, *REAL)] == [
        0
    ] * 3
    assert wanted.jobs() == [made.job("two", INTEGER, REAL), made.job("one", REAL)]


def test_a_mark_is_of_one_function_one_set_of_versions_and_one_processor(made, monkeypatch):
    jobs = [made.job("one"), made.job("two"), made.job("one", REAL), made.job("one", INTEGER, REAL)]
    assert len({job.mark() for job in jobs}) == 4
    assert made.job("one", INTEGER, REAL).mark() == made.job("one", REAL, INTEGER).mark()
    before = jobs[0].mark()
    monkeypatch.setattr(precompile.llvm, "get_host_cpu_name", lambda: "another")
    assert jobs[0].mark() != before


def test_jobs_come_in_one_by_one_until_there_are_no_more(made):
    source, target = io.BytesIO(), io.BytesIO()
    kinds = (types.literal(3), numba.typeof(np.zeros(2, np.uint16)))
    for job in (made.job("one"), made.job("two", INTEGER, REAL)):
        pickle.dump(job, source)
    assert pickle.loads(pickle.dumps(made.job("one", kinds))) == made.job("one", kinds)
    source.seek(0)
    take_jobs(source, target)
    assert target.getvalue() == DONE * 2
    assert (made.compiled("one"), made.compiled("two")) == ((1, 0), (2, 0))
