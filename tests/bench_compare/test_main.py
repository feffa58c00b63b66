from __future__ import annotations

import json

import pytest

from bench.compare import __main__ as command
from bench.compare.counters import CountersUnavailableError
from bench.compare.sides import CompareError, Rows, Side

COMMIT = "0123456789abcdef"


@pytest.fixture
def scripted(monkeypatch):
    """Sides that answer from a script: what each runs, and "decode 1" at speeds[side] in every round."""
    speeds, runs = {"base": 100.0, "new": 100.0}, []

    def bench(self, rows, extra=()):
        runs.append((self.name, rows, list(extra)))
        drift = 1 + 0.1 * ((len(runs) + 1) // 2 % 2)  # the machine's own, the same in both runs of a round
        return {name: speeds[self.name] * drift for name, _ in rows.each()}

    monkeypatch.setattr(Side, "bench", bench)
    monkeypatch.setattr(Side, "check", lambda self: None)
    monkeypatch.setattr(command, "commit_of", lambda name: COMMIT)
    monkeypatch.setattr(command, "side_of_commit", lambda commit, folder: Side("base", folder))
    monkeypatch.setattr(command, "side_of_working_tree", lambda folder: Side("new", folder))
    monkeypatch.setattr(command, "git", lambda *arguments: b"")
    monkeypatch.setattr(command, "count_during", unavailable)
    return speeds, runs


def unavailable(work):
    raise CountersUnavailableError("a test has no counter")


@pytest.mark.parametrize(("new", "exit_code", "verdict"), [(80.0, 1, "slower"), (99.0, 0, "no"), (130.0, 0, "faster")])
def test_the_exit_code_is_1_where_a_row_is_slower(scripted, capsys, new, exit_code, verdict):
    scripted[0]["new"] = new
    assert command.main(["HEAD", "--quick"]) == exit_code
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-1 if verdict != "no" else -2] for row in rows if row[:2] == ["decode", "16"]] == [verdict]


def test_the_table_is_followed_by_the_rule_and_by_why_there_are_no_instruction_counts(scripted, capsys):
    command.main(["HEAD", "--quick"])
    out = capsys.readouterr().out
    assert "the median ratio is off by more than 3.0%" in out
    assert "instruction counts: none, a test has no counter" in out


def test_the_sides_take_turns_with_the_same_rows_and_settings(scripted):
    command.main(
        ["HEAD", "--rounds", "3", "--decode", "2", "--prefill", "", "--no-w1", "--engine-arguments", "--isa x"]
    )
    runs = scripted[1]
    assert [name for name, _, _ in runs] == ["base", "new", "new", "base", "base", "new"]
    assert {(rows, tuple(extra)) for _, rows, extra in runs} == {(Rows("smollm2", "2", "", False), ("--isa", "x"))}


@pytest.mark.parametrize(
    ("flags", "rounds", "rows"),
    [
        ([], 8, Rows("smollm2", "1,4,16,64", "128,512", True)),
        (["--quick"], 6, Rows("smollm2", "1,16", "512", False)),
        (["--quick", "--w1", "--rounds", "1", "--prefill", ""], 1, Rows("smollm2", "1,16", "", True)),
    ],
)
def test_quick_is_fewer_rows_and_fewer_rounds_and_each_flag_wins_over_it(scripted, flags, rounds, rows):
    command.main(["HEAD", *flags])
    assert len(scripted[1]) == 2 * rounds
    assert scripted[1][0][1] == rows


def test_instructions_are_counted_row_by_row_on_one_thread_less_those_of_starting_up(scripted, capsys, monkeypatch):
    counted = iter([1000, 1000, 3000, 2800, 11000, 11000])  # start: base, new; then base and new of each row

    def count_during(work):
        work()
        return next(counted)

    monkeypatch.setattr(command, "count_during", count_during)
    command.main(["HEAD", "--decode", "1,2", "--prefill", "", "--no-w1", "--rounds", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["instructions_ratio"] for row in rows] == [0.9, 1.0]
    assert all(extra == ["--threads", "1"] for _, _, extra in scripted[1][2:])


def test_json_holds_the_commit_the_rule_and_every_rounds_figures(scripted, capsys):
    scripted[0]["new"] = 50.0
    assert command.main(["HEAD", "--quick", "--json", "--no-instructions"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["base_commit"] == COMMIT
    assert found["no_instructions"] == "not asked for"
    row = found["rows"][0]
    assert (row["name"], row["verdict"], len(row["base_tok_s"]), row["ratio"]) == ("decode 1", "slower", 6, 0.5)


def test_what_cannot_be_compared_is_one_line_and_exit_code_2(scripted, capsys, monkeypatch):
    def refuse(name):
        raise CompareError(f"there is no commit {name!r}")

    monkeypatch.setattr(command, "commit_of", refuse)
    assert command.main(["nowhere"]) == 2
    assert capsys.readouterr().err == "error: there is no commit 'nowhere'\n"


def test_no_rounds_at_all_is_wrong_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["HEAD", "--rounds", "0"])


def test_the_folder_of_both_sides_is_gone_afterwards(scripted, monkeypatch):
    folders = []

    def side(folder):
        folders.append(folder.parent)
        assert folder.parent.is_dir()
        return Side("new", folder)

    monkeypatch.setattr(command, "side_of_working_tree", side)
    command.main(["HEAD", "--quick"])
    assert not folders[0].exists()
