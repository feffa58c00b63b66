from __future__ import annotations

import json

import pytest

from millpond.cli import loading
from millpond.cli.app import run
from millpond.lab import bench_startup
from millpond.lab.bench_startup import Start, StartupResult

RESULT = StartupResult(Start(6.5, 11.25, 300 * 2**20), (Start(1.25, 1.5, 200 * 2**20),))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The model and the rounds that the command measures with."""
    seen = []

    def measure(model, rounds, environment, clock, notify):
        seen.append((model, rounds))
        notify("first start")
        return RESULT

    monkeypatch.setattr(loading, "fetch_model", lambda model, settings: tmp_path / f"{model}.gguf")
    monkeypatch.setattr(bench_startup, "measure_startup", measure)
    return seen


def test_the_table_has_a_row_for_the_cold_and_one_for_the_warm_start(asked, capsys):
    assert run(["bench", "startup"], {}) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["cold", "6.50", "11.25", "300.0", "MiB"] in rows
    assert ["warm", "1.25", "1.50", "200.0", "MiB"] in rows


def test_json_is_the_result_on_standard_output_alone(asked, capsys):
    assert run(["bench", "startup", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == RESULT.as_json()


def test_the_model_and_the_number_of_starts_can_be_chosen(asked, tmp_path):
    run(["bench", "startup"], {})
    run(["bench", "startup", "--model", "other", "--rounds", "2"], {})
    assert asked == [(tmp_path / "smollm2.gguf", 5), (tmp_path / "other.gguf", 2)]
