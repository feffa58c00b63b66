import os
import sys
from pathlib import Path

import pytest

from bench.peers import processes
from bench.peers.processes import EngineProcess

ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"
STAT = """cpu  900 0 0 0 0 0 0 0 0 0
cpu0 100 20 30 5000 7 2 1 4 50 0
cpu1 200 0 0 5000 0 0 0 0 0 0
cpu10 900 0 0 0 0 0 0 0 0 0
intr 1
"""


@pytest.fixture
def started(tmp_path):
    some = []

    def start(code):
        process = EngineProcess.start(
            "engine",
            [sys.executable, "-c", code],
            log=tmp_path / "engine.log",
            cores=(min(os.sched_getaffinity(0)),),
            environment={"MARK": "here"},
            folder=tmp_path,
            pipes=True,
        )
        some.append(process)
        return process

    yield start
    for process in some:
        process.stop()
        for pipe in (process.popen.stdin, process.popen.stdout):
            pipe.close()


def state(process):
    return Path(f"/proc/{process.popen.pid}/stat").read_text().rpartition(")")[2].split()[0]


def say(process, line):
    process.popen.stdin.write(line + "\n")
    process.popen.stdin.flush()
    return process.popen.stdout.readline().strip()


def test_an_engine_runs_on_its_cores_with_its_environment(started):
    process = started("import os; print(len(os.sched_getaffinity(0)), os.environ['MARK'], flush=True); input()")
    assert process.popen.stdout.readline().split() == ["1", "here"]


def test_a_paused_engine_stands_still_and_answers_after_it_is_resumed(started):
    process = started(ECHO)
    assert say(process, "abc") == "cba"
    process.pause()
    assert os.waitid(os.P_PID, process.popen.pid, os.WSTOPPED | os.WNOWAIT)
    assert state(process) == "T"
    process.resume()
    assert say(process, "xyz") == "zyx"


def test_a_paused_engine_can_be_stopped(started):
    process = started(ECHO)
    process.pause()
    process.stop()
    assert process.popen.poll() is not None


def test_a_failure_names_the_engine_and_shows_the_end_of_its_log(started):
    process = started("import sys; sys.exit('no room left')")
    process.popen.wait()
    failure = str(process.failure("the worker ended"))
    assert failure.startswith("engine: the worker ended")
    assert failure.endswith("no room left")


def test_the_peak_memory_of_a_tree_counts_its_children(started):
    child = "b = bytearray(40_000_000); print(1, flush=True); input()"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    process = started(code)
    process.popen.stdout.readline()
    assert len(list(processes.tree(process.popen.pid))) == 2
    assert processes.peak_bytes(process.popen.pid) > 40_000_000


def test_busy_time_is_that_of_the_cores_named_without_idle_and_guest_time():
    ticks = processes.busy_seconds((0, 1), STAT) * processes.TICKS
    assert ticks == 100 + 20 + 30 + 2 + 1 + 4 + 200


def test_others_share_is_what_neither_the_engine_nor_the_harness_used(monkeypatch):
    meter = processes.NoiseMeter((0, 1))
    readings = iter([(0.0, 0.0, 0.0), (10.0, 19.0, 14.0)])
    monkeypatch.setattr(processes.NoiseMeter, "_read", lambda self: next(readings))
    meter.start()
    assert meter.others_share() == 0.25


def test_the_processor_time_of_a_tree_keeps_that_of_children_that_have_ended(started):
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    process = started(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}]); print(1, flush=True); input()"
    )
    process.popen.stdout.readline()
    assert processes.cpu_seconds(process.popen.pid) >= 0.3
