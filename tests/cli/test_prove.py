from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from millpond.cli import progress
from millpond.cli.app import run
from millpond.core.scheduler import Scheduler
from millpond.lab import faults, proof
from millpond.lab.faults import PlantedFault, WithoutWaiver

TINY = ["prove", "--positions", "2", "--slots", "1", "--requests", "1", "--budget", "0", "--guesses", "0"]


def test_the_whole_is_printed_states_bounds_verdict_and_the_shortest_traces(capsys):
    assert run(TINY, {}) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "│ 2 x 1 │ 2 │" in out
    assert "bounds: blocks x block size up to 2, up to 1 slot, every reserve, no budget of tokens, no guesses" in out
    assert "verdict: every invariant holds in every state, and every state drains (" in out
    assert out.count("planted: ") == 6
    assert "9 step 3: INV-7: the first request b stands still, step 3 runs []" in out
    assert "NOT FOUND" not in out


@pytest.fixture
def two_faults(monkeypatch):
    """Only two are planted, and they are found at once."""
    quick = tuple(fault for fault in faults.FAULTS if fault.name in ("no-waiver", "next-chunk-only"))
    monkeypatch.setattr(faults, "FAULTS", quick)


def test_json_is_one_object_on_standard_output_alone(capsys, two_faults):
    assert run([*TINY, "--json"], {}) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bounds"] == {
        "positions": 2,
        "slots": 1,
        "requests": 1,
        "budget": 0,
        "guesses": 0,
        "prefix_cache": False,
        "any_reserve": False,
        "disk": False,
        "policy": "fcfs",
        "whole_prompts": False,
    }
    assert (result["verdict"], result["finding"]) == ("holds", None)
    assert result["states"] == sum(pool["num_states"] for pool in result["pools"])
    assert [each["name"] for each in result["faults"]] == ["no-waiver", "next-chunk-only"]
    assert all(each["finding"]["trace"][-1].startswith("step") for each in result["faults"])


@pytest.mark.parametrize(("policy", "more"), [("fcfs", ""), ("fair", ", fair")])
def test_whole_prompts_have_bounds_and_faults_of_their_own(capsys, policy, more):
    small = ["--positions", "2", "--requests", "2", "--budget", "2"]
    assert run(["prove", "--whole-prompts", "--policy", policy, *small], {}) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"any number in all, whole prompts{more}" in out
    assert out.count("planted: ") == 2
    assert "INV-11: request b has 1 tokens from position 0 on, which is not the whole prompt" in out
    assert "NOT FOUND" not in out


def test_whole_prompts_have_no_guesses_though_the_deep_bounds_have_some(capsys):
    small = ["--positions", "1", "--slots", "1", "--requests", "1", "--budget", "1", "--no-faults", "--json"]
    assert run(["prove", "--deep", "--whole-prompts", *small], {}) == 0
    bounds = json.loads(capsys.readouterr().out)["bounds"]
    assert (bounds["whole_prompts"], bounds["guesses"]) == (True, 0)


@pytest.mark.parametrize("flag", [["--prefix-cache"], ["--disk"], ["--guesses", "1"]], ids=str)
def test_whole_prompts_refuse_what_would_cut_them(capsys, flag):
    assert run(["prove", "--whole-prompts", *flag], {}) == 1
    assert "--whole-prompts have no prefix cache, no disk and no guesses" in capsys.readouterr().err


def test_the_prefix_cache_has_bounds_and_faults_of_its_own(capsys, monkeypatch):
    quick = tuple(fault for fault in faults.SHARING_FAULTS if fault.name == "found-too-soon")
    monkeypatch.setattr(faults, "SHARING_FAULTS", quick)
    assert run(["prove", "--prefix-cache", "--positions", "1"], {}) == 0
    out = capsys.readouterr().out
    assert "2 unfinished at once, any number in all, with the prefix cache" in out
    assert "planted: blocks are found before they are computed; found in 2 blocks of 1, 1 slot" in out


def test_a_disk_has_faults_of_its_own_beside_those_of_the_prefix_cache(capsys, monkeypatch):
    monkeypatch.setattr(faults, "SHARING_FAULTS", ())
    assert run(["prove", "--disk", "--positions", "1"], {}) == 0
    out = capsys.readouterr().out
    assert "2 unfinished at once, any number in all, with the prefix cache and a disk" in out
    assert "planted: what is on its way from disk is found; found in 2 blocks of 1, 1 slot" in out
    assert "planted: a block counts that was not loaded; found in 2 blocks of 1, 1 slot" in out


def test_a_broken_rule_is_shown_with_its_trace_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(Scheduler, "_reserve", WithoutWaiver._reserve)
    assert run(TINY, {}) == 1
    out = capsys.readouterr().out
    assert "verdict: BROKEN in 2 blocks of 1, 1 slot, reserve 1, 1 request (" in out
    assert "   2 step 0: INV-5: step 0 has 1 unfinished and 0 tokens or releases" in out
    assert "planted" not in out


def test_a_planted_fault_that_goes_unseen_is_named_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(faults, "FAULTS", (PlantedFault("none", "nothing is wrong", Scheduler),))
    monkeypatch.setattr(proof, "FAULT_BOUNDS", proof.Bounds(positions=1, requests=1))
    assert run(TINY, {}) == 1
    assert "planted: nothing is wrong; NOT FOUND" in capsys.readouterr().out
    assert run([*TINY, "--json"], {}) == 1
    assert json.loads(capsys.readouterr().out)["faults"] == [
        {"name": "none", "text": "nothing is wrong", "finding": None}
    ]
    assert run([*TINY, "--no-faults"], {}) == 0


@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        ([], proof.Bounds()),
        (["--deep"], proof.DEEP),
        (["--slots", "4"], proof.Bounds(slots=4)),
        (["--any-reserve"], proof.Bounds(any_reserve=True)),
        (["--disk"], proof.ON_DISK),
        (["--disk", "--prefix-cache", "--budget", "1"], replace(proof.ON_DISK, budget=1)),
    ],
)
def test_flags_choose_the_bounds(monkeypatch, flags, bounds):
    seen = []

    def prove(bounds, notify):
        seen.append(bounds)
        return proof.Proof(bounds, (), None)

    monkeypatch.setattr(proof, "prove", prove)
    assert run(["prove", "--no-faults", *flags], {}) == 0
    assert seen == [bounds]


def test_a_bound_that_cannot_be_is_one_line_that_names_the_option(capsys):
    assert run(["prove", "--positions", "0"], {}) == 1
    assert capsys.readouterr().err == "error: --positions must be from 1 to 12, got 0\n"


def test_a_person_sees_how_far_it_is(monkeypatch, two_faults):
    watched = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    bar = progress.counting_bar
    monkeypatch.setattr(progress, "counting_bar", lambda total: bar(total, watched))
    assert run(TINY, {}) == 0
    assert "5/6" in watched.file.getvalue()
    assert "planted: next-chunk-only" in watched.file.getvalue()
