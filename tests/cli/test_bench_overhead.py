from __future__ import annotations

import json
import sys
from contextlib import contextmanager

import pytest

from millpond.cli.app import run
from millpond.lab import bench_http, bench_overhead
from millpond.lab.bench_http import HttpRow, StreamLoad
from millpond.lab.bench_overhead import PARTS, StepRow

HTTP = HttpRow(64, 1000.0, 930.0, 0.93, (0.9, 0.93, 0.95), 0.05)


@pytest.fixture
def calls(engine, monkeypatch):
    """What the command measures, each with a made-up row; and the servers that it starts."""
    seen = []

    def steps(engine, num_sequences, rounds, clock):
        seen.append(("steps", num_sequences, rounds))
        return StepRow(num_sequences, dict.fromkeys(PARTS, 25e-6), 4e-3, 0.0625)

    @contextmanager
    def serving(command):
        seen.append(("serve", command))
        yield "http://127.0.0.1:80"

    def http(engine, url, load, rounds, clock, notify):
        seen.append(("http", url, load, rounds))
        notify("64 streams")
        return HTTP

    monkeypatch.setattr(bench_overhead, "measure_steps", steps)
    monkeypatch.setattr(bench_http, "serving", serving)
    monkeypatch.setattr(bench_http, "measure_http", http)
    return seen


def test_json_is_both_measurements_on_standard_output_alone(calls, capsys):
    assert run(["bench", "overhead", "--sequences", "1", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == {
        "steps": [
            {
                "sequences": 1,
                "microseconds": dict.fromkeys(PARTS, 25.0),
                "step_microseconds": 4000.0,
                "outside_share": 0.0625,
            }
        ],
        "http": {
            "streams": 64,
            "in_process_tok_s": 1000.0,
            "http_tok_s": 930.0,
            "ratio": 0.93,
            "ratios": [0.9, 0.93, 0.95],
            "client_cpu_share": 0.05,
        },
    }


def test_the_tables_fit_a_terminal_and_have_every_figure(calls, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["bench", "overhead"], {}) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word in (*PARTS, "25", "4000", "6.2%", "1000", "930", "0.93", "0.90 to 0.95", "5%"):
        assert word in out


def test_flags_choose_what_is_measured_and_the_server_gets_the_same_settings(calls, engine):
    flags = "--sequences 2,80 --streams 3 --max-tokens 9 --rounds 1 --threads 1 --kv-memory 1M --isa portable"
    assert run(["bench", "overhead", "--model", "m.gguf", "--kv-dtype", "int8", *flags.split()], {}) == 0
    (_, config) = engine.opened[0]
    assert (config.max_num_seqs, config.threads, config.kv_memory, config.isa) == (80, 1, 2**20, "portable")
    assert config.kv_dtype == "int8"
    first, second, (_, command), http = calls
    assert (first, second) == (("steps", 2, 1), ("steps", 80, 1))
    assert http == ("http", "http://127.0.0.1:80", StreamLoad(num_streams=3, max_tokens=9), 1)
    assert command[:5] == [sys.executable, "-m", "millpond.cli", "serve", "m.gguf"]
    given = (
        "--port 0 --log-level warning --dtype auto --kv-dtype int8 --quantize off --isa portable "
        "--max-num-seqs 80 --kv-memory 1048576 --threads 1"
    )
    assert command[5:] == given.split()


def test_the_server_that_is_started_is_a_command_that_exists(calls, engine, monkeypatch):
    run(["bench", "overhead", "--sequences", "", "--threads", "2"], {})
    command = dict(call for call in calls if call[0] == "serve")["serve"]
    opened = len(engine.opened)
    served = []
    monkeypatch.setattr("millpond.serve.run.serve", lambda *args, **settings: served.append(settings))
    assert run(command[3:], {}) == 0
    assert engine.opened[opened:] == engine.opened[:opened]
    assert len(served) == 1


def test_without_streams_no_server_is_started(calls, capsys):
    assert run(["bench", "overhead", "--streams", "0", "--json"], {}) == 0
    assert [each[1] for each in calls] == [1, 4, 16, 64]
    assert json.loads(capsys.readouterr().out)["http"] is None
