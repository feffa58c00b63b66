from __future__ import annotations

import json

import pytest

from millpond.cli import loading
from millpond.cli.app import run
from millpond.lab import bench_engine
from millpond.lab.bench_engine import BenchPlan, BenchResult
from millpond.lab.step_record import read_records
from tiny_engine import make_engine


@pytest.fixture
def plans(engine, monkeypatch):
    """The plans that the command carries out, each with the same made-up result."""
    seen = []

    def carry_out(self, plan, notify):
        seen.append(plan)
        notify("decode, 4 sequences")
        return BenchResult({4: 830.04}, {128: 2091.0}, None)

    monkeypatch.setattr(bench_engine.EngineBench, "run", carry_out)
    return seen


def test_json_is_the_result_on_standard_output_alone(plans, capsys):
    assert run(["bench", "engine", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == {
        "decode_tok_s": {"4": 830.0},
        "prefill_tok_s": {"128": 2091.0},
        "w1_output_tok_s": None,
    }


def test_the_table_has_a_row_for_each_figure(plans, capsys):
    assert run(["bench", "engine"], {}) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any("decode" in row and "4" in row and "830" in row for row in rows)
    assert any("prefill" in row and "128" in row and "2091" in row for row in rows)
    assert not any("W1," in row for row in rows)


def test_without_flags_it_measures_everything(plans):
    run(["bench", "engine"], {})
    assert plans == [BenchPlan(decode=(1, 4, 16, 64), prefill=(128, 512, 1024), w1=True, rounds=3)]


def test_flags_choose_what_is_measured(plans):
    run(["bench", "engine", "--decode", "1,4", "--prefill", "", "--no-w1", "--rounds", "1"], {})
    assert plans == [BenchPlan(decode=(1, 4), prefill=(), w1=False, rounds=1)]


def test_the_engine_has_a_slot_for_every_sequence(plans, engine):
    run(["bench", "engine", "--decode", "100", "--threads", "1"], {})
    _, config = engine.opened[0]
    assert (config.max_num_seqs, config.threads) == (100, 1)


def test_record_writes_every_step_and_simulate_runs_on_them(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "open_engine", lambda *arguments: make_engine(num_blocks=128, max_model_len=256))
    path = tmp_path / "steps.jsonl"
    flags = ["--decode", "2", "--prefill", "", "--no-w1", "--rounds", "1", "--record", str(path)]
    assert run(["bench", "engine", *flags, "--json"], {}) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["decode_tok_s"]) == ["2"]
    records = read_records(path)
    assert f"{len(records)} steps are in {path}" in captured.err
    assert sum(shape[:3] == (2, 2, 2) for shape, _ in records) == 2 * 64  # a round that warms up, and one that counts
    assert sum(shape.num_sampled == 0 for shape, _ in records) > 0
    assert run(["simulate", "--cost", str(path), "--requests", "5"], {}) == 0
    assert f"fitted to {len(records)} steps" in capsys.readouterr().out


def test_record_into_a_folder_that_is_not_there_is_refused_before_measuring(plans, capsys, tmp_path):
    assert run(["bench", "engine", "--record", str(tmp_path / "nowhere" / "steps.jsonl")], {}) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert plans == []
