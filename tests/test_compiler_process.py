"""The process that compiles is started for a first start before anything that compiles is imported, ending with it."""

import contextlib
import subprocess
import sys

import pytest

from millpond import compiler_process
from millpond.compiler_process import compiler_for_first_start, marks_in, start_compiler
from millpond.source_hash import kernels_below

# The command, told what it is told when it would start the process: the folder, and what has been imported by then.
FIRST = """
import sys
from millpond import compiler_process
from millpond.cli.app import run

def start(folder):
    print(folder, *{"numpy", "numba", "millpond.build", "millpond.serve.run"} & set(sys.modules))
    sys.exit(0)

compiler_process.start_compiler = start
run(["serve", "nothing-of-that-name"], ENVIRONMENT)
"""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(compiler_process, "usable_cores", lambda: 2)


@pytest.fixture
def nobody(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("a process was started"))


def started_by_serve(environment):
    script = FIRST.replace("ENVIRONMENT", repr(environment))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_serve_starts_it_before_it_imports_what_compiles_computes_or_serves(tmp_path):
    assert started_by_serve({"MILLPOND_CACHE": str(tmp_path)}) == [str(kernels_below(tmp_path))]


def test_it_keeps_what_it_compiles_where_numba_was_told(tmp_path):
    environment = {"MILLPOND_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "own")}
    assert started_by_serve(environment) == [str(tmp_path / "own")]


@pytest.mark.parametrize("fault", [None, KeyboardInterrupt, ValueError])
def test_it_ends_with_what_it_was_started_for(tmp_path, fault):
    outcome = contextlib.nullcontext() if fault is None else pytest.raises(fault)
    with outcome, compiler_for_first_start(tmp_path) as compiler:
        assert compiler.folder == tmp_path
        assert compiler.process.poll() is None
        if fault is not None:
            raise fault
    assert compiler.process.returncode is not None


def test_a_folder_in_which_something_was_compiled_needs_none(tmp_path, nobody):
    marks_in(tmp_path).mkdir()
    with compiler_for_first_start(tmp_path) as compiler:
        assert compiler is None


def test_there_is_none_where_there_is_no_core_for_it(tmp_path, nobody, monkeypatch):
    monkeypatch.setattr(compiler_process, "usable_cores", lambda: 1)
    with compiler_for_first_start(tmp_path) as compiler:
        assert compiler is None


def test_there_is_none_where_no_process_can_be_had(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError("too many processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert start_compiler(tmp_path) is None
