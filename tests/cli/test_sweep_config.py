from __future__ import annotations

import json

import pytest

from millpond.cli.app import run

SMALL = ["--pool-tokens", "32", "--block-sizes", "4", "--slots", "3", "--budgets", "64", "--reserves", "0,1,2,3"]
WORKLOAD = ["--requests", "8", "--prompt-tokens", "6", "--max-tokens", "10"]
SWEEP = ["sweep", "config", *SMALL, *WORKLOAD, "--rates", "inf"]


def test_json_is_every_setting_the_front_and_the_advice(capsys):
    assert run([*SWEEP, "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["reserve"], each["preemptions"]) for each in found["settings"]] == [(0, 4), (1, 3), (2, 1), (3, 0)]
    assert {each["num_blocks"] for each in found["settings"]} == {8}
    assert found["chosen"] in found["pareto"]
    assert found["advice"].startswith(f"take reserve {found['chosen']['reserve']}: ")
    assert found["cost"]["source"].startswith("built in")


def test_the_table_fits_a_terminal_with_every_field_swept_and_ends_in_the_advice(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    flags = "--pool-tokens 64,96 --slots 2,3 --budgets 8,64 --block-sizes 4,8 --reserves 0,1 --rates 3,9 --ttft-slo 1"
    assert run(["sweep", "config", *flags.split(), *WORKLOAD], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = ["pool", "slots", "budget", "block", "reserve", "tok/s", "TTFT", "ITL", "preempted", "used"]
    assert next(line.split()[:10] for line in lines if "tok/s" in line) == headings
    rows = [line for line in lines if line.strip().endswith(tuple("0123456789")) and "%" in line]
    assert len(rows) == 32
    assert any(line.startswith("*") for line in lines)
    assert max(map(len, lines[:-1])) <= 80
    assert "…" not in "".join(lines)
    assert "at 9 requests a second" in lines[0]
    assert lines[-1].startswith("take a pool of ")


def test_a_trace_is_swept_in_place_of_rates(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0.0, "prompt_tokens": 6, "output_tokens": 10}\n' * 8)
    traced = ["sweep", "config", *SMALL, "--trace", str(trace)]
    assert run([*traced, "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert [(each["rate"], each["preemptions"]) for each in found] == [(None, 4), (None, 3), (None, 1), (None, 0)]
    assert run(traced, {}) == 0
    assert "p99 TTFT (s)" in capsys.readouterr().out


def test_a_picture_is_written(capsys, tmp_path):
    assert run([*SWEEP, "--plot", str(tmp_path / "front.svg")], {}) == 0
    assert "<!-- take reserve" in (tmp_path / "front.svg").read_text()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--slots", "4,4"], 1, "--slots repeats a value: 4,4"),
        (["--budgets", "2"], 1, "--budgets 2 is below --slots 3"),
        (["--reserves", "8"], 1, "--reserves 8 leaves nothing of the 8 blocks"),
        (["--reserves", "some"], 2, "'--reserves': 'some' is not a list of numbers"),
        (["--reserves", "-1"], 2, "'--reserves': '-1' holds a number below 0"),
        (["--slots", "0"], 2, "'--slots': '0' holds a number below 1"),
        (["--slots", ""], 1, "--slots must name at least one value"),
        (["--slots", "1000000000000"], 2, "'--slots': '1000000000000' holds a number above 1048576"),
        (["--pool-tokens", "1000000000000"], 2, "'--pool-tokens': '1000000000000' holds a number above 4194304"),
        (["--block-sizes", "nan"], 2, "'--block-sizes': 'nan' is not a list of numbers"),
        (["--rates", "fast"], 2, "'--rates': 'fast' is not a list of numbers"),
        (["--rates", ""], 2, "'--rates': name at least one rate (say 4,6.5)"),
        (["--rates", "5,0"], 2, "'--rates': '5,0' holds a rate that is not above 0"),
        (["--rates", "nan,5"], 2, "'--rates': 'nan,5' holds a rate that is not above 0"),
        (["--rates", "1e-300"], 1, "(--rate)"),
        (["--prompt-tokens", "60"], 1, "the longest request could never run"),
    ],
)
def test_what_cannot_be_swept_is_refused_in_one_line(capsys, flags, code, message):
    assert run([*SWEEP, *flags], {}) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_sweep_alone_prints_its_help(capsys):
    assert run(["sweep"], {}) == 0
    assert "config" in capsys.readouterr().out
