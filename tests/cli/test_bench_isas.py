from __future__ import annotations

import json
import time

import pytest

from millpond.cli.app import run
from millpond.runner import bench_isas
from millpond.runner.bench_isas import IsaRow

ROWS = [IsaRow("4-bit", 16, "avx2", 2.1e11, 2.2, 2.15, 2.25), IsaRow("4-bit", 16, "portable", 9.5e10, 1.0, 1.0, 1.0)]


@pytest.fixture
def asked(monkeypatch):
    """The plans that the command carries out."""
    seen = []

    def measure(plan, clock, notify):
        assert clock is time.thread_time
        seen.append(plan)
        notify("4-bit, 16 rows")
        return ROWS

    monkeypatch.setattr(bench_isas, "measure_isas", measure)
    return seen


def test_the_table_has_a_row_for_every_instruction_set(asked, capsys):
    assert run(["bench", "isas"], {}) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["4-bit", "16", "avx2", "210", "2.20", "2.15", "-", "2.25"] in rows
    assert ["4-bit", "16", "portable", "95", "1.00", "1.00", "-", "1.00"] in rows


def test_json_is_the_result_on_standard_output_alone(asked, capsys):
    assert run(["bench", "isas", "--json"], {}) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "weights": "4-bit",
        "rows": 16,
        "isa": "avx2",
        "operations_s": 2.1e11,
        "ratio": 2.2,
        "ratio_low": 2.15,
        "ratio_high": 2.25,
    }
    assert second["isa"] == "portable"


def test_weights_rows_and_rounds_can_be_chosen(asked):
    run(["bench", "isas"], {})
    run(["bench", "isas", "--weights", "8-bit, 4-bit", "--rows", "3,5", "--rounds", "2"], {})
    assert [(plan.weights, plan.rows, plan.rounds) for plan in asked] == [
        (("4-bit", "8-bit", "bfloat16"), (1, 16, 128), 49),
        (("8-bit", "4-bit"), (3, 5), 2),
    ]


def test_weights_that_are_not_there_are_refused_with_those_that_are(capsys):
    assert run(["bench", "isas", "--weights", "2-bit"], {}) != 0
    assert "weights must be among 4-bit, 8-bit, bfloat16; got '2-bit'" in capsys.readouterr().err
