from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from millpond.cli import loading, progress
from millpond.cli.app import run
from millpond.core.step import SampledTokens
from millpond.lab.determinism import CONDITIONS
from tiny_engine import LETTERS, make_engine

SMALL = ["verify", "determinism", "--requests", "16", "--slots", "6", "--prompt-tokens", "48", "--max-tokens", "8"]
QUICK = [*SMALL, "--conditions", "crowd,everything"]


class OnOneThreadInACrowd:
    """A runner whose tokens at output position 3 depend on whether others are there."""

    def __init__(self, inner):
        self.inner = inner

    def execute(self, output):
        result = self.inner.execute(output)
        if len(output.scheduled) == 1:
            return result
        there = {each.request_id for each in output.scheduled if each.samples and each.output_position == 3}
        return dataclasses.replace(
            result,
            sampled=tuple(
                SampledTokens(each.request_id, (*each.token_ids[:-1], LETTERS[0])) if each.request_id in there else each
                for each in result.sampled
            ),
        )


@pytest.fixture
def opened(monkeypatch):
    """Engines of a script in place of the model's; which configs were asked for, and what goes around their runners."""
    configs, wraps = [], {}

    def open_engine(model, config, settings):
        configs.append(config)
        sizes = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        wrap = wraps.get(config.threads, lambda runner: runner)
        engine = make_engine(wrap=wrap, **{name: getattr(config, name) for name in sizes})
        engine.config = dataclasses.replace(config, isa="avx2" if config.isa == "auto" else config.isa)
        return engine

    monkeypatch.setattr(loading, "open_engine", open_engine)
    return configs, wraps


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_each_kind_of_kv_and_number_of_threads_is_checked_and_the_verdict_is_last(opened, capsys):
    assert run([*QUICK, "--threads", "2,1"], {}) == 0
    configs, _ = opened
    assert [(config.kv_dtype, config.threads) for config in configs] == [
        ("auto", 2),
        ("auto", 1),
        ("int8", 2),
        ("int8", 1),
    ]
    assert all(config.audit and config.speculative == "ngram" for config in configs)
    out = capsys.readouterr().out
    # The first number of threads runs all that was asked for, the other one what is all of it together.
    assert len(lines_with(out, "│ crowd ", " same ")) == 2
    assert len(lines_with(out, "│ alone ", " same ")) == len(lines_with(out, "│ everything ", " same ")) == 4
    assert len(set(lines_with(out, "fingerprint"))) >= 1
    assert out.splitlines()[-1].startswith("verdict: the same tokens and the same bits in every run (10 runs, ")


def test_all_conditions_are_run_unless_some_are_named(opened, capsys):
    assert run([*SMALL, "--threads", "1", "--kv-dtype", "int8", "--json"], {}) == 0
    report = json.loads(capsys.readouterr().out)
    (part,) = report["parts"]
    assert (report["verdict"], report["num_requests"], report["seed"]) == ("same", 16, 0)
    assert (part["kv_dtype"], part["threads"], part["isa"]) == ("int8", 1, "avx2")
    assert len(part["fingerprint"]) == 16
    assert len(part["rows"]) == 1 + len(CONDITIONS) + 1
    assert {row["verdict"] for row in part["rows"]} == {"same"}


def test_a_fault_is_shown_with_its_place_and_how_to_see_it_again_and_exit_code_1(opened, capsys):
    _, wraps = opened
    wraps[1] = OnOneThreadInACrowd
    flags = ["--threads", "2,1", "--kv-dtype", "auto", "--seed", "5"]
    assert run([*QUICK, *flags], {}) == 1
    out = capsys.readouterr().out
    (said,) = lines_with(out, "K/V auto, 1 thread, avx2, everything: ", " differ; the first: request r")
    assert said.endswith(", output at position 3")
    (got,) = lines_with(out, "  got       token ")
    assert f"token {LETTERS[0]}" in got
    assert "(bits " in got
    (again,) = lines_with(out, "  again     millpond verify determinism --model smollm2 ")
    assert "--requests 16 --seed 5 --slots 6 --prompt-tokens 48 --max-tokens 8" in again
    assert "--conditions everything --dtype auto --kv-dtype auto --quantize off --threads 2,1 --isa avx2" in again
    assert out.splitlines()[-1].startswith("verdict: DIFFERENT in 1 of 5 runs (")
    assert run(again.split()[2:], {}) == 1
    assert said in capsys.readouterr().out


def test_json_tells_the_difference_and_exit_code_1(opened, capsys):
    _, wraps = opened
    wraps[2] = OnOneThreadInACrowd
    assert run([*SMALL, "--conditions", "crowd", "--threads", "2", "--kv-dtype", "auto", "--json"], {}) == 1
    report = json.loads(capsys.readouterr().out)
    _, row = report["parts"][0]["rows"]
    assert (report["verdict"], row["verdict"], row["difference"]["position"]) == ("different", "different", 3)
    assert row["difference"]["expected"]["token"] != row["difference"]["got"]["token"] == LETTERS[0]


def test_what_was_not_forced_is_said_and_exit_code_1(opened, capsys, monkeypatch):
    monkeypatch.setitem(CONDITIONS, "crowd", dataclasses.replace(CONDITIONS["crowd"], forces=("aborted",)))
    assert run([*SMALL, "--conditions", "crowd", "--threads", "1", "--kv-dtype", "auto"], {}) == 1
    out = capsys.readouterr().out
    assert "crowd: not forced: aborted; more requests may do it (--requests)" in out
    assert out.splitlines()[-1].startswith("verdict: NOT FORCED in 1 of 2 runs (")


def test_a_checkpoint_is_packed_as_it_is_loaded(opened, capsys):
    assert run([*QUICK, "--threads", "1", "--kv-dtype", "auto", "--quantize", "q4", "--json"], {}) == 0
    assert [config.quantize for config in opened[0]] == ["q4"]
    assert json.loads(capsys.readouterr().out)["quantize"] == "q4"


def test_float32_has_one_kind_of_kv(opened, capsys):
    assert run([*QUICK, "--threads", "1", "--dtype", "float32"], {}) == 0
    assert [(config.dtype, config.kv_dtype) for config in opened[0]] == [("float32", "auto")]


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--conditions", "crowds"], 1, "no condition is called 'crowds'"),
        (["--requests", "3"], 1, "--requests must be at least 16"),
        (["--kv-dtype", "int4"], 2, "'int4' is not one of auto, int8"),
        (["--threads", "0"], 2, "holds a number below 1"),
        (["--threads", ","], 2, "name at least one number of threads"),
    ],
)
def test_flags_that_cannot_be_are_one_line(opened, capsys, flags, code, said):
    assert run(["verify", "determinism", "--threads", "1", *flags], {}) == code
    assert said in capsys.readouterr().err
    assert opened[0] == []


def test_a_person_sees_how_far_it_is(opened, monkeypatch):
    watched = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    bar = progress.counting_bar
    monkeypatch.setattr(progress, "counting_bar", lambda total: bar(total, watched))
    assert run([*QUICK, "--threads", "2,1", "--kv-dtype", "auto"], {}) == 0
    assert "4/5" in watched.file.getvalue()
    assert "K/V auto, threads 1: everything" in watched.file.getvalue()
