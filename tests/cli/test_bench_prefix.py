from __future__ import annotations

import json
import time

import pytest

from millpond.cli.app import run
from millpond.config import EngineConfig
from millpond.lab import bench_prefix
from millpond.lab.bench_prefix import PrefixRow

ROW = PrefixRow("shared", 8704, 2032, 7680, 1.5004, 0.25, 100.4, 180.0, 1.7931)


@pytest.fixture
def asked(engine, monkeypatch):
    """What the command measures, each time with the same made-up row."""
    seen = []

    def carry_out(self, workloads, rounds, notify):
        seen.append((workloads, rounds, self.clock))
        notify("shared")
        return [ROW]

    monkeypatch.setattr(bench_prefix.PrefixBench, "run", carry_out)
    engine.config = EngineConfig()
    return seen


def test_json_is_the_rows_on_standard_output_alone(asked, capsys):
    assert run(["bench", "prefix", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == [ROW.as_json()]


def test_the_table_has_a_line_for_each_row(asked, capsys):
    assert run(["bench", "prefix"], {}) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "shared" in line]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells == ["shared", "8704", "7680", "1500 ms", "250 ms", "100", "180", "1.793x"]


@pytest.mark.parametrize(("threads", "clock"), [(1, time.process_time), (2, time.perf_counter)])
def test_flags_choose_what_is_measured_and_one_thread_is_measured_by_the_processors_time(asked, engine, threads, clock):
    engine.config = EngineConfig(threads=threads)
    assert run(["bench", "prefix", "--workloads", "chat, shared", "--rounds", "2", "--kv-dtype", "int8"], {}) == 0
    assert asked == [(["chat", "shared"], 2, clock)]
    assert engine.opened[0][1].kv_dtype == "int8"
