from __future__ import annotations

import json
import time

import pytest

from millpond.cli.app import run
from millpond.config import EngineConfig
from millpond.lab import bench_speculative
from millpond.lab.bench_speculative import SpeculativePlan, SpeculativeRow

ROW = SpeculativeRow("repetitive", 4, 100.4, 180.0, 1.79, 2.5, 300, 200)


@pytest.fixture
def plans(engine, monkeypatch):
    """The plans that the command carries out, each with the same made-up row; and the prompts it brings."""
    seen = []

    def carry_out(self, plan, notify):
        seen.append((plan, self.prompts, self.clock))
        notify("repetitive, 4 at once")
        return [ROW]

    monkeypatch.setattr(bench_speculative.SpeculativeBench, "run", carry_out)
    engine.config = EngineConfig()
    return seen


def test_json_is_the_rows_on_standard_output_alone(plans, capsys):
    assert run(["bench", "speculative", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == [ROW.as_json()]


def test_the_table_has_a_line_for_each_row(plans, capsys):
    assert run(["bench", "speculative"], {}) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "repetitive" in line]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells == ["repetitive", "4", "100", "180", "1.79x", "2.50", "200/300"]


def test_flags_choose_what_is_measured_and_by_which_engine(plans, engine):
    flags = "--sequences 2,80 --max-tokens 9 --temperature 0.5 --rounds 1 --speculative-tokens 3 --threads 1"
    assert run(["bench", "speculative", *flags.split()], {}) == 0
    assert plans[0][0] == SpeculativePlan(sequences=(2, 80), max_tokens=9, temperature=0.5, rounds=1)
    _, config = engine.opened[0]
    assert (config.speculative, config.speculative_tokens, config.max_num_seqs) == ("ngram", 3, 80)


@pytest.mark.parametrize(("threads", "clock"), [(1, time.process_time), (2, time.perf_counter)])
def test_one_thread_is_measured_by_the_processors_time(plans, engine, threads, clock):
    engine.config = EngineConfig(threads=threads)
    assert run(["bench", "speculative"], {}) == 0
    assert plans[0][2] is clock


def test_the_questions_go_through_the_chat_template(plans):
    run(["bench", "speculative"], {})
    assert all("".join(map(chr, prompt)).startswith("user:") for prompt in plans[0][1]["ordinary"])
