from __future__ import annotations

import json
import time

import pytest

from millpond.cli.app import run
from millpond.lab import bench_scheduler
from millpond.lab.bench_scheduler import SchedulerRow


@pytest.fixture
def asked(monkeypatch):
    seen = []

    def measure(running, waiting, steps, clock, notify):
        assert clock is time.thread_time
        seen.append((running, waiting, steps))
        return [SchedulerRow(256, 10_000, 450e-6, 330e-6, 780e-6)]

    monkeypatch.setattr(bench_scheduler, "measure_all", measure)
    return seen


def test_the_table_has_microseconds(asked, capsys):
    assert run(["bench", "scheduler"], {}) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["256", "10000", "450", "330", "780"] in rows
    assert asked == [((64, 256), (100, 10_000), 200)]


def test_json_is_one_list_and_sizes_can_be_chosen(asked, capsys):
    assert run(["bench", "scheduler", "--running", "1", "--waiting", "2,3", "--steps", "4", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "running": 256,
            "waiting": 10000,
            "schedule_microseconds": 450.0,
            "update_microseconds": 330.0,
            "step_microseconds": 780.0,
        }
    ]
    assert asked == [((1,), (2, 3), 4)]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--running", "0"], 2, "'--running': '0' holds a number below 1"),
        (["--running", "4097"], 2, "'--running': '4097' holds a number above 4096"),
        (["--waiting", "10000000000"], 2, "'--waiting': '10000000000' holds a number above 1000000"),
        (["--waiting", "nan"], 2, "'--waiting': 'nan' is not a list of numbers"),
        (["--steps", "0"], 2, "'--steps'"),
        (["--steps", "10001"], 2, "'--steps'"),
        (["--running", ""], 1, "--running and --waiting must each name at least one number"),
    ],
)
def test_what_would_take_gigabytes_or_nothing_is_refused_in_one_line(capsys, flags, code, message):
    assert run(["bench", "scheduler", *flags], {}) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
