"""The flood of the lab: single requests wait for all of it under fcfs, and for no more than the bound under fair."""

from __future__ import annotations

import json

import pytest

from millpond.cli.app import run as run_command
from millpond.errors import ConfigError
from millpond.lab.bench_fairness import Flood, run

SMALL = Flood(num_requests=200, every=10, prompt_tokens=24, output_tokens=12, slots=8, budget=32)


def delays(policy, flood=SMALL):
    return [delay for _, delay in run(flood, policy).delays]


def test_under_fair_no_single_request_waits_longer_than_the_bound_and_under_fcfs_nearly_all_do():
    fair, fcfs = delays("fair"), delays("fcfs")
    assert SMALL.most_steps == 3
    assert len(fair) >= 10
    assert max(fair) <= SMALL.most_steps
    assert sum(delay > SMALL.most_steps for delay in fcfs) >= len(fcfs) - 2
    assert max(fcfs) > 100


def test_under_priority_they_pass_the_flood_until_it_has_aged():
    long = Flood(num_requests=3000, every=100, prompt_tokens=8, output_tokens=8, slots=8, budget=64)
    found = run(long, "priority").delays
    assert {delay for came, delay in found if came <= 900} == {1}
    assert min(delay for came, delay in found if 1100 <= came < 2000) > 100


def test_the_same_flood_gives_the_same_figures():
    assert run(SMALL, "fair") == run(SMALL, "fair")


def test_a_budget_that_leaves_nothing_for_prompts_is_refused():
    with pytest.raises(ConfigError, match="of 64 tokens leaves nothing beside 64 slots"):
        Flood(budget=64)


def test_the_command_prints_every_policy_and_draws_a_picture(capsys, tmp_path):
    picture = tmp_path / "fairness.svg"
    sizes = ["--flood", "60", "--every", "5", "--prompt-tokens", "8", "--max-tokens", "8", "--slots", "4"]
    assert run_command(["bench", "fairness", *sizes, "--json", "--plot", str(picture)], {}) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["fcfs", "priority", "fair"]
    assert all('id="' + row["policy"] + '"' in picture.read_text() for row in rows)
    assert run_command(["bench", "fairness", *sizes], {}) == 0
    assert "fair" in capsys.readouterr().out
