from __future__ import annotations

import json
from random import Random

import pytest

from millpond.cli import loading
from millpond.cli.app import run
from millpond.lab.step_record import StepRecord, StepShape, write_records
from tiny_engine import make_engine

SMALL = ["--blocks", "8", "--block-size", "4", "--max-num-seqs", "3", "--watermark-blocks", "0"]
TABLE = ["simulate", "--requests", "8", "--rate", "inf", "--prompt-tokens", "6", "--max-tokens", "10", *SMALL]


def simulated(capsys, *flags):
    assert run([*TABLE, "--json", *flags], {}) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def steps(tmp_path):
    """A file of steps that take 10 ms, and 1 ms for each of their tokens."""
    path = tmp_path / "steps.jsonl"
    random = Random(0)
    shapes = [StepShape(*(random.randint(1, 60) for _ in StepShape._fields)) for _ in range(40)]
    write_records([StepRecord(shape, 0.01 + 0.001 * shape.num_tokens) for shape in shapes], path)
    return path


def test_json_is_the_run_the_pool_and_the_cost(capsys):
    found = simulated(capsys)
    assert (found["simulated"]["preemptions"], found["simulated"]["steps"], found["simulated"]["requests"]) == (
        4,
        38,
        8,
    )
    assert found["pool"]["num_blocks"] == 8
    assert found["cost"]["source"].startswith("built in")
    assert found["run_requests_s"] > 0
    assert "real" not in found


def test_the_reserve_the_slots_and_the_budget_reach_the_scheduler(capsys):
    assert simulated(capsys, "--watermark-blocks", "3")["simulated"]["preemptions"] == 0
    assert simulated(capsys, "--max-num-seqs", "1")["pool"]["most_running"] == 1
    assert simulated(capsys, "--max-num-batched-tokens", "3")["simulated"]["steps"] > 41


def test_the_cost_is_fitted_to_the_recorded_steps(capsys, steps):
    found = simulated(capsys, "--cost", str(steps), "--requests", "1", "--max-tokens", "2")
    assert found["cost"]["source"] == "steps.jsonl"
    assert found["simulated"]["ttft_s"]["p50"] == pytest.approx(0.016)
    assert found["simulated"]["itl_s"]["p50"] == pytest.approx(0.011)


def test_the_table_has_the_percentiles_the_goodput_and_the_pool(capsys):
    assert run([*TABLE, "--ttft-slo", "0.001", "--itl-slo", "9"], {}) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["preemptions", "4"] in rows
    assert ["recompute", "share", "23.7%"] in rows
    assert ["goodput", "0.00/s,", "0.0%"] in rows
    for name in ("TTFT p50", "TTFT p99", "ITL p90", "end to end p99", "output tok/s"):
        assert name in out
    assert "pool: 8 blocks" in out
    assert "100% at the most" in out


def test_a_trace_replaces_the_drawn_workload(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival": 50 * each, "prompt_tokens": 3 + each, "output_tokens": 2} for each in (1, 0)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert run(["simulate", "--trace", str(trace), *SMALL, "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)["simulated"]
    assert (found["requests"], found["output_tokens"], found["steps"]) == (2, 4, 6)
    assert 50 < found["seconds"] < 51


def test_against_runs_the_same_workload_on_the_real_engine(capsys, monkeypatch):
    opened = []

    def open_engine(model, config, settings):
        opened.append((model, config.num_blocks, config.max_num_seqs))
        return make_engine(num_blocks=8, max_num_seqs=3)

    monkeypatch.setattr(loading, "open_engine", open_engine)
    found = simulated(capsys, "--against", "m.gguf")
    assert opened == [("m.gguf", 8, 3)]
    assert (found["real"]["preemptions"], found["real"]["steps"], found["real"]["output_tokens"]) == (4, 38, 80)
    speeds = found["simulated"]["output_tok_s"], found["real"]["output_tok_s"]
    assert found["errors"]["output_tok_s"] == pytest.approx(speeds[0] / speeds[1] - 1)
    assert run([*TABLE, "--against", "m.gguf"], {}) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows[0] == ["simulated", "real", "error"]
    assert ["preemptions", "4", "4"] in rows
    assert any(row[:2] == ["output", "tok/s"] and row[-1].endswith("%") for row in rows)


def test_a_picture_is_written(capsys, tmp_path):
    simulated(capsys, "--plot", str(tmp_path / "run.png"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "-1"], "rate (--rate) must be above 0 requests a second, got -1"),
        (["--rate", "nan"], "rate (--rate) must be above 0 requests a second, got nan"),
        (["--rate", "1", "--burstiness", "inf"], "(--burstiness) must be 0, or from 0.01 to 100, got inf"),
        (["--watermark", "nan"], "--watermark must be at least 0 and below 1, or auto, got nan"),
        (
            ["--watermark-blocks", "8"],
            "--watermark-blocks must be at least 0 and below the 8 blocks of the pool, got 8",
        ),
        (["--max-model-len", "0"], "--max-model-len must be an integer of at least 1, got 0"),
        (["--blocks", "3"], "needs 4 blocks of 4 tokens and the pool has 3"),
        (["--ttft-slo", "0"], "--ttft-slo must be above 0 seconds and finite, got 0"),
        (["--itl-slo", "-2"], "--itl-slo must be above 0 seconds and finite, got -2"),
        (
            ["--cost", "nowhere.jsonl"],
            "there is no file nowhere.jsonl; make one for --cost with: millpond bench",
        ),
        (["--max-num-batched-tokens", "2"], "--max-num-batched-tokens (2) must be at least --max-num-seqs (3)"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(capsys, flags, message):
    assert run([*TABLE, *flags], {}) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
