from __future__ import annotations

import subprocess

import pytest

from bench.compare import sides
from bench.compare.sides import CompareError, Rows, Side, commit_of, side_of_commit, side_of_working_tree

SOURCE = "src/millpond/__init__.py"
PROGRAM = """import json, sys
print(json.dumps({"decode_tok_s": {"1": len(sys.argv)}, "prefill_tok_s": {}, "w1_output_tok_s": None}))
"""


@pytest.fixture
def repository(tmp_path):
    """A repository whose committed sources say "old" and whose working tree says "new"."""
    root = tmp_path / "repository"
    (root / "src/millpond/cli").mkdir(parents=True)
    (root / SOURCE).write_text("version = 'old'\n")
    (root / "src/millpond/cli/__init__.py").write_text("")
    (root / "src/millpond/cli/__main__.py").write_text(PROGRAM)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "src"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    (root / SOURCE).write_text("version = 'new'\n")
    return root


def said_by(side: Side) -> str:
    return side.run("-c", "import millpond; print(millpond.version)").strip()


def test_each_side_runs_its_own_sources(repository, tmp_path):
    commit = commit_of("HEAD", repository)
    base = side_of_commit(commit, tmp_path / "base", repository)
    new = side_of_working_tree(tmp_path / "new", repository)
    assert (said_by(base), said_by(new)) == ("old", "new")
    assert (base.name, new.name) == ("base", "new")
    base.check()
    new.check()


def test_edits_after_the_copy_change_nothing(repository, tmp_path):
    new = side_of_working_tree(tmp_path / "new", repository)
    (repository / SOURCE).write_text("raise SystemExit\n")
    assert said_by(new) == "new"


def test_the_repository_keeps_no_trace_of_a_comparison(repository, tmp_path):
    side_of_commit(commit_of("HEAD", repository), tmp_path / "base", repository)
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True)
    assert len(worktrees.stdout.splitlines()) == 1


def test_each_side_keeps_compiled_kernels_of_its_own(tmp_path):
    folders = [Side("a", tmp_path / name).environment()["NUMBA_CACHE_DIR"] for name in ("base", "new")]
    assert folders == [str(tmp_path / "base" / "kernels"), str(tmp_path / "new" / "kernels")]


def test_sources_that_would_not_be_the_ones_to_run_are_an_error(tmp_path):
    with pytest.raises(CompareError, match="would import"):
        Side("base", tmp_path).check()  # there is no src/ in it, so the installed package is found


def test_a_commit_that_is_not_there_is_named(repository):
    with pytest.raises(CompareError, match="no commit 'nowhere'"):
        commit_of("nowhere", repository)


def test_a_run_that_fails_says_which_side_and_why(tmp_path):
    with pytest.raises(CompareError, match=r"base: .* ended with 3: a reason"):
        Side("base", tmp_path).run("-c", "import sys; print('a reason', file=sys.stderr); sys.exit(3)")


def test_a_run_gives_the_rows_that_the_command_prints(repository, tmp_path):
    new = side_of_working_tree(tmp_path / "new", repository)
    assert new.bench(Rows("m", "1", "", False), ["--isa", "portable"]) == {"decode 1": 15.0}


def test_the_rows_are_asked_for_with_the_flags_of_bench_engine():
    asked = ["--model", "m", "--decode", "1,4", "--prefill", "", "--no-w1", "--rounds", "1", "--json"]
    assert Rows("m", "1,4", "", False).arguments() == asked
    assert "--w1" in Rows("m", "1,4", "", True).arguments()


def test_bench_engine_knows_every_flag_that_is_asked_for():
    import typer.main

    from millpond.cli.app import make_app

    command = typer.main.get_command(make_app()).commands["bench"].commands["engine"]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    asked = {word for w1 in (True, False) for word in Rows("m", "1", "2", w1).arguments() if word.startswith("--")}
    assert asked | {"--threads"} <= known


def test_rows_one_by_one_have_the_names_of_the_rows_together():
    each = Rows("m", "1,16", "512", True).each()
    assert [name for name, _ in each] == ["decode 1", "decode 16", "prefill 512", "W1"]
    assert [row.arguments()[3:7:2] for _, row in each] == [["1", ""], ["16", ""], ["", "512"], ["", ""]]
    assert [row.w1 for _, row in each] == [False, False, False, True]
    assert Rows("m", "1", "2", True).none().each() == []


def test_sources_are_those_of_this_repository():
    assert (sides.ROOT / "src" / "millpond" / "__init__.py").exists()
