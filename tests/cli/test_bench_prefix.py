from __future__ import annotations

import json
import time

import pytest

from millpond.cli.app import run
from millpond.config import EngineConfig
from millpond.lab import bench_prefix, bench_restart
from millpond.lab.bench_prefix import PrefixRow
from millpond.lab.bench_restart import RestartRow
from millpond.load import store
from tiny_llama import write_tiny_llama

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


RESTART_ROW = RestartRow(4000, 3984, 91_000_000, 1.2504, 0.06, 0.02, 20.84)


@pytest.fixture
def restarted(engine, monkeypatch):
    """The same for --restart."""
    seen = []

    def carry_out(self, lengths, rounds, notify):
        notify("4000 tokens")
        seen.append((lengths, rounds))
        return [RESTART_ROW]

    monkeypatch.setattr(bench_restart.RestartBench, "run", carry_out)
    engine.config = EngineConfig()
    return seen


def test_a_restart_is_measured_where_it_is_asked_for(restarted, tmp_path, capsys):
    flags = ["--restart", "--lengths", "100,4000", "--rounds", "2", "--cache-dir", str(tmp_path)]
    assert run(["bench", "prefix", *flags], {}) == 0
    assert restarted == [((100, 4000), 2)]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "4000" in line]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells == ["4000", "3984", "86.8 MiB", "1250 ms", "60 ms", "20 ms", "20.8x"]
    assert list(tmp_path.iterdir()) == []
    assert run(["bench", "prefix", "--restart", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == [RESTART_ROW.as_json()]


def test_the_model_of_a_restart_is_the_one_in_the_folder_of_the_settings(restarted, tmp_path, monkeypatch):
    seen = []

    def resolve(model, *, cache_dir=None, progress=None):
        seen.append((model, cache_dir))
        return tmp_path / "tiny.gguf"

    write_tiny_llama(tmp_path / "tiny.gguf")
    monkeypatch.setattr(store, "resolve", resolve)
    assert run(["bench", "prefix", "--restart", "--json"], {"MILLPOND_CACHE": str(tmp_path / "cache")}) == 0
    assert seen == [("smollm2", tmp_path / "cache")]


def test_a_folder_that_cannot_be_used_is_an_error_of_one_line(restarted, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(["bench", "prefix", "--restart", "--cache-dir", str(tmp_path / "file")], {}) == 1
    error = capsys.readouterr().err
    assert "prefixes cannot be kept in" in error
    assert "; name a folder that can be written to with --cache-dir" in error
    assert restarted == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--restart", "--workloads", "chat"],
            "'--workloads': it is not used with --restart: leave out one of the two",
        ),
        (["--lengths", "512"], "'--lengths': it is used with --restart alone: add it, or leave this out"),
        (["--cache-dir", "DIR"], "'--cache-dir': it is used with --restart alone: add it, or leave this out"),
        (["--restart", "--cache-dir", ""], "'--cache-dir': the name of the folder is empty"),
        (["--restart", "--lengths", "512,1k"], "'--lengths': '512,1k' is not a list of numbers"),
    ],
)
def test_an_option_that_would_not_be_looked_at_is_wrong_usage(
    asked, restarted, engine, tmp_path, capsys, flags, message
):
    flags = [str(tmp_path) if each == "DIR" else each for each in flags]
    assert run(["bench", "prefix", *flags], {}) == 2
    assert message in capsys.readouterr().err
    assert (engine.opened, asked, restarted) == ([], [], [])
