from __future__ import annotations

import json

import pytest

from millpond.cli import sweep
from millpond.cli.app import run

WATERMARK = ["sweep", "watermark"]
EXAMPLE = "--requests 8 --prompt-tokens 6 --max-tokens 10 --slots 3 --blocks 8 --block-size 4 --reserves 0,1,2,3,auto"


def points(capsys, flags):
    assert run([*WATERMARK, *flags.split(), "--json"], {}) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_a_list_with_an_object_for_each_reserve(capsys):
    assert points(capsys, EXAMPLE)[2] == {
        "watermark_blocks": 2,
        "preemptions": 1,
        "thrashed_admissions": 1,
        "admissions": 9,
        "iterations": 41,
        "forward_tokens": 128,
        "recomputed_tokens": 9,
        "recompute_share": 9 / 128,
        "completed": 8,
    }


def test_without_flags_it_is_that_example(capsys):
    assert points(capsys, "") == points(capsys, EXAMPLE)


def test_with_json_the_choice_is_said_beside_it(capsys):
    assert run([*WATERMARK, "--json"], {}) == 0
    assert capsys.readouterr().err.startswith("reserve auto: against reserve 0 it has 3 fewer preemptions")


def test_the_table_has_a_row_for_each_reserve_and_marks_the_chosen_one(capsys):
    assert run(WATERMARK, {}) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in out.splitlines() if line[:1] == "│"]
    assert rows == [
        ["0", "4", "4", "38", "152", "23.7%", "8"],
        ["1", "3", "3", "41", "144", "18.8%", "8"],
        ["2", "1", "1", "41", "128", "7.0%", "8"],
        ["3", "0", "0", "41", "120", "0.0%", "8"],
        ["* auto", "1", "1", "38", "128", "7.0%", "8"],
    ]
    assert "reserve auto: " in out


def test_auto_stands_where_it_is_named_and_is_the_reserve_that_chooses_itself(capsys):
    auto, fixed = points(capsys, "--reserves auto,2")
    assert (auto["watermark_blocks"], auto["preemptions"], auto["iterations"]) == ("auto", 1, 38)
    assert fixed["watermark_blocks"] == 2


def test_the_counter_case(capsys):
    without, with_reserve = points(capsys, "--max-tokens 19 --slots 6 --blocks 16 --reserves 0,3")
    assert (without["preemptions"], with_reserve["preemptions"]) == (5, 5)
    assert with_reserve["iterations"] - without["iterations"] == 4


def test_lengths_are_drawn_by_the_seed(capsys):
    flags = "--requests 30 --prompt-tokens 2-9 --max-tokens 3,14 --blocks 12 --reserves 0"
    drawn = [points(capsys, f"{flags} --seed {seed}")[0]["forward_tokens"] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_every_setting_reaches_the_scheduler(capsys):
    base = points(capsys, "--reserves 0")[0]
    for flags in ("--slots 1", "--blocks 9", "--block-size 5", "--max-num-batched-tokens 4", "--requests 7"):
        assert points(capsys, f"--reserves 0 {flags}")[0] != base, flags


def test_the_audit_is_on_where_it_is_asked_for(monkeypatch):
    plans = []
    measure = sweep.measure
    monkeypatch.setattr(sweep, "measure", lambda plan, reserves: plans.append(plan) or measure(plan, reserves))
    assert run(WATERMARK, {}) == run([*WATERMARK, "--audit"], {}) == 0
    assert [plan.audit for plan in plans] == [False, True]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival": arrival, "prompt_tokens": 4, "output_tokens": 4} for arrival in (0.0, 1.0)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_trace_brings_its_requests_and_their_times(capsys, trace):
    early, late = (
        points(capsys, f"--trace {trace} --slots 1 --reserves 0 --step-seconds {each}")[0] for each in (0.1, 1)
    )
    assert early["completed"] == late["completed"] == 2
    # At a tenth of a second a step the first has drained before the second comes.
    assert (early["iterations"], late["iterations"]) == (10, 9)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--reserves 0,8", 1, "a reserve of 8 blocks (--reserves) cannot be held by a pool of 8 (--blocks)"),
        ("--reserves auto,auto", 1, "the reserve auto is named 2 times (--reserves)"),
        ("--reserves 1,1", 1, "the reserve 1 is named 2 times (--reserves)"),
        ("--reserves=", 1, "name at least one (--reserves 0,1,2)"),
        ("--reserves=-1", 2, "'--reserves': '-1' holds a number below 0"),
        ("--reserves x", 2, "'--reserves': 'x' is not a list of numbers"),
        ("--max-tokens 60", 1, "needs 17 blocks of 4 tokens and the pool has 8; max_tokens can be at most 27"),
        ("--slots 0", 2, "'--slots'"),
        ("--slots 1000000000000", 2, "'--slots'"),
        ("--blocks 1000000000000", 2, "'--blocks'"),
        ("--block-size 0", 2, "'--block-size'"),
        ("--max-num-batched-tokens 0", 2, "'--max-num-batched-tokens'"),
        ("--step-seconds nan", 1, "(--step-seconds), got nan"),
        ("--step-seconds inf", 1, "(--step-seconds), got inf"),
        ("--step-seconds 0", 1, "(--step-seconds), got 0"),
    ],
)
def test_bad_input_is_refused_in_one_line_that_names_the_option(capsys, flags, code, message):
    assert run([*WATERMARK, *flags.split()], {}) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_picture_is_written_beside_the_table(capsys, tmp_path):
    assert run([*WATERMARK, "--plot", str(tmp_path / "a.svg")], {}) == 0
    assert "<!-- with the waiver -->" in (tmp_path / "a.svg").read_text()
    assert "reserve auto" in capsys.readouterr().out


CONTEST = ["sweep", "reserve", "--requests", "30", "--seeds", "1"]


def test_the_reserve_that_chooses_itself_against_every_fixed_one(capsys):
    assert run([*CONTEST, "--kinds", "equal,bursts", "--json"], {}) == 0
    equal, bursts = json.loads(capsys.readouterr().out)
    assert (equal["kind"], bursts["kind"]) == ("equal", "bursts")
    assert equal["fixed_work"][str(equal["best_reserve"])] == min(equal["fixed_work"].values())
    assert equal["difference"] == round(equal["auto_work"] / min(equal["fixed_work"].values()) - 1, 4)


def test_their_table_has_a_row_for_each_kind_of_traffic(capsys):
    assert run([*CONTEST, "--kinds", "bursts"], {}) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row.strip("│ ").split()[0] for row in rows] == ["bursts"]


@pytest.mark.parametrize(("kinds", "message"), [("x", "'x' is none of bursts, shift"), ("", "name at least one of")])
def test_kinds_of_traffic_that_there_are_not_are_refused(capsys, kinds, message):
    assert run([*CONTEST, f"--kinds={kinds}"], {}) == 2
    assert message in capsys.readouterr().err


def test_without_a_subcommand_it_prints_its_help(capsys):
    assert run(["sweep"], {}) == 0
    assert "watermark" in capsys.readouterr().out
