"""Starts are timed until the server says that it answers, the first one with nothing in its cache folder."""

import itertools
import sys
from pathlib import Path

import pytest

from millpond.errors import EngineError
from millpond.lab import bench_startup
from millpond.lab.bench_startup import Start, StartupResult, measure_startup, time_start

SERVER = "import sys, time\nprint('loading', file=sys.stderr)\n{work}\n"
ANSWERS = "print('millpond serves tiny at http://127.0.0.1:1', file=sys.stderr, flush=True)\ntime.sleep(60)"


def ticking():
    """A clock that moves on by a second with each look at it."""
    return itertools.count(start=0.0, step=1.0).__next__


def server(work: str) -> list[str]:
    return [sys.executable, "-c", SERVER.format(work=work)]


def test_a_start_lasts_until_the_server_says_that_it_answers():
    start = time_start(server(ANSWERS), {}, ticking())
    assert start.seconds == 1.0
    assert 0 < start.cpu_seconds < 60
    assert start.peak_bytes > 2**20


def test_what_other_processes_of_a_server_used_counts_too():
    spin = "import time\nwhile time.process_time() < 1: pass"
    other = f"import subprocess\nsubprocess.run([sys.executable, '-c', {spin!r}])"
    assert time_start(server(f"{other}\n{ANSWERS}"), {}, ticking()).cpu_seconds > 1


@pytest.mark.parametrize(("work", "said"), [("sys.exit('no such model')", "loading no such model"), ("", "loading")])
def test_a_server_that_does_not_come_up_is_an_error_with_what_it_said(work, said):
    with pytest.raises(EngineError, match=f"the server did not come up: {said}$"):
        time_start(server(work), {}, ticking())


def test_all_starts_share_one_folder_that_is_empty_at_first_and_gone_at_last(monkeypatch):
    seen, names = [], []

    def start(command, environment, clock):
        folder = Path(environment["MILLPOND_CACHE"])
        seen.append(
            (command[-3:], folder, len(list(folder.iterdir())), environment["NUMBA_CACHE_DIR"], environment["A"])
        )
        (folder / f"{len(seen)}").touch()
        return Start(10.0 - len(seen), 1.0, 1)

    monkeypatch.setattr(bench_startup, "time_start", start)
    result = measure_startup(Path("m.gguf"), 2, {"A": "1", "NUMBA_CACHE_DIR": "/elsewhere"}, ticking(), names.append)
    folder = seen[0][1]
    assert seen == [(["m.gguf", "--port", "0"], folder, count, "", "1") for count in (0, 1, 2)]
    assert names == ["first start", "warm start 1", "warm start 2"]
    assert not folder.exists()
    assert (result.first.seconds, [each.seconds for each in result.later]) == (9.0, [8.0, 7.0])


def test_a_warm_start_is_the_median_of_each_figure():
    result = StartupResult(Start(9.0, 12.0, 500), (Start(1.0, 3.0, 30), Start(2.0, 1.0, 10), Start(3.0, 2.0, 20)))
    assert result.warm == Start(2.0, 2.0, 20)
    assert result.as_json() == {
        "cold": {"seconds": 9.0, "cpu_seconds": 12.0, "peak_bytes": 500},
        "warm": {"seconds": 2.0, "cpu_seconds": 2.0, "peak_bytes": 20},
    }
