from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from millpond.cli import loading
from millpond.cli.app import run
from millpond.lab import bench_pace
from millpond.lab.bench_pace import PaceRow

ROW = PaceRow(4, 99, (0.002,) * 10, (0.005, 0.005), 1.25)


@pytest.fixture
def asked(monkeypatch):
    """The configs that engines were opened with, and what was measured."""
    seen = []

    def open_engine(model, config, settings):
        seen.append(config)
        return SimpleNamespace(limits=SimpleNamespace(max_total_tokens=100))

    def measure(engine, streams, prompt_tokens, clock, notify):
        assert clock is time.perf_counter
        seen.append((streams, prompt_tokens))
        return ROW

    monkeypatch.setattr(loading, "open_engine", open_engine)
    monkeypatch.setattr(bench_pace, "measure_pace", measure)
    return seen


def test_the_table_has_milliseconds_and_the_ratio(asked, capsys):
    assert run(["bench", "pace"], {}) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["4", "99", "2.0", "2.0", "5.0", "5.0", "2.5", "1.25"] in rows
    assert asked[0].itl_target is None
    assert asked[1] == (4, 99)


def test_flags_choose_what_is_measured(asked, capsys):
    flags = "--itl-target 15 --streams 70 --prompt-tokens 7 --max-num-batched-tokens 99 --threads 1 --json"
    assert run(["bench", "pace", *flags.split()], {}) == 0
    assert json.loads(capsys.readouterr().out) == ROW.as_json()
    config = asked[0]
    assert (config.itl_target, config.max_num_seqs, config.max_num_batched_tokens, config.threads) == (15.0, 71, 99, 1)
    assert asked[1] == (70, 7)
