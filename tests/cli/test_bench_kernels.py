from __future__ import annotations

import json
from dataclasses import replace

import pytest

from millpond import build
from millpond.cli import loading, options
from millpond.cli.app import run
from millpond.kernels.roofline import MachineRates
from millpond.model.floors import StepShape
from millpond.runner import bench_kernels
from millpond.runner.bandwidth import Bandwidth
from millpond.runner.bench_kernels import KernelReport, PhaseRow, StepReport

RATES = MachineRates(2, "avx512", {1 << 19: 2e11, 1 << 29: 3e10}, 7e9, {"u8 x s8": 7.45e11})
ROWS = (
    PhaseRow("arrays", 64, 500.0, 400.0, 0.0, "", 0.05, 0, 0),
    PhaseRow("gate up", 64, 9500.0, 9000.0, 4750.0, "compute", 0.95, 1e9, 1e7),
)
REPORT = KernelReport(RATES, (StepReport(StepShape(64, 1, 160), 0.01, ROWS),))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The settings and plans that the command measures with, each with the same made-up report."""
    seen = []

    def measure(build, config, plan, notify):
        seen.append((config, plan))
        notify("decode 64 at 160")
        return REPORT

    monkeypatch.setattr(loading, "fetch_model", lambda model, settings: tmp_path / "model.gguf")
    monkeypatch.setattr(bench_kernels, "measure_kernels", measure)
    return seen


def lines_of(output: str) -> list[list[str]]:
    return [line.replace("│", " ").split() for line in output.splitlines()]


def test_the_tables_have_a_row_for_each_rate_each_step_and_each_phase(asked, capsys):
    assert run(["bench", "kernels"], {}) == 0
    lines = lines_of(capsys.readouterr().out)
    assert ["products", "of", "u8", "x", "s8", "745", "G", "operations/s"] in lines
    assert ["read", "in", "random", "pieces", "of", "2", "KB", "7.0", "GB/s"] in lines
    assert ["decode", "64", "at", "160", "64", "10000", "4750", "48", "6400", "tok/s"] in lines
    assert ["gate", "up", "64", "9500", "4750", "50", "compute", "95.0%"] in lines
    assert ["arrays", "64", "500", "5.0%"] in lines


def test_a_phase_that_is_faster_than_the_machine_is_doubted(asked, capsys, monkeypatch):
    doubt = "something else had the cores"
    run(["bench", "kernels"], {})
    assert doubt not in capsys.readouterr().out
    fast = (PhaseRow("head", 64, 100.0, 90.0, 150.0, "compute", 0.5, 1e9, 1e7),)
    report = KernelReport(RATES, (StepReport(StepShape(64, 1, 160), 0.01, fast),))
    monkeypatch.setattr(bench_kernels, "measure_kernels", lambda build, config, plan, notify: report)
    run(["bench", "kernels"], {})
    assert doubt in capsys.readouterr().out


def test_a_step_that_memory_bounds_has_a_line_with_its_share_of_the_memorys_speed(asked, capsys, monkeypatch):
    run(["bench", "kernels"], {})
    assert "plain reads" not in capsys.readouterr().out
    step = replace(REPORT.steps[0], bandwidth=Bandwidth(912e6, 30.5e9, 83.4))
    monkeypatch.setattr(bench_kernels, "measure_kernels", lambda *arguments: KernelReport(RATES, (step,)))
    run(["bench", "kernels"], {})
    assert "decode 64 at 160: 912 MB a step, at 83 % of the 30.5 GB/s of plain reads" in capsys.readouterr().out


def test_a_shape_is_measured_with_random_weights_and_no_file(asked, monkeypatch):
    built = []
    monkeypatch.setattr(loading, "fetch_model", lambda *arguments: pytest.fail("a file was asked for"))
    monkeypatch.setattr(build, "build_random_runner", lambda shape, config: built.append((shape, config)))
    monkeypatch.setattr(bench_kernels, "measure_kernels", lambda make, config, plan, notify: make(config) or REPORT)
    assert run(["bench", "kernels", "--shape", "llama-1b", "--dtype", "float32"], {}) == 0
    assert [(shape.num_layers, config.dtype) for shape, config in built] == [(16, "float32")]


def test_an_unknown_shape_is_refused_by_name(asked, capsys):
    assert run(["bench", "kernels", "--shape", "llama-2t"], {}) == 1
    assert "--shape must be one of smollm2-135m, llama-1b, got 'llama-2t'" in capsys.readouterr().err
    assert asked == []


def test_json_is_the_report_on_standard_output_alone(asked, capsys):
    assert run(["bench", "kernels", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(REPORT.as_json()))


def test_without_flags_it_measures_decode_at_two_contexts_and_three_prefills(asked):
    run(["bench", "kernels"], {})
    _, plan = asked[0]
    assert (plan.decode, plan.contexts, plan.prefill) == ((1, 4, 16, 64), (160, 1024), (128, 512, 1024))


def test_flags_choose_the_steps_and_the_settings(asked):
    arguments = ["--decode", "2", "--context", "50", "--prefill", "", "--repetitions", "1"]
    assert run(["bench", "kernels", *arguments, "--threads", "1", "--isa", "portable", "--dtype", "float32"], {}) == 0
    assert run(["bench", "kernels", *arguments, "--kv-dtype", "int8"], {}) == 0
    assert asked[1][0].kv_dtype == "int8"
    config, plan = asked[0]
    assert plan.shapes == [StepShape(2, 1, 50)]
    assert (plan.repetitions, config.threads, config.isa, config.dtype) == (1, 1, "portable", "float32")


def test_the_picture_is_written_beside_the_table(asked, tmp_path, capsys):
    assert run(["bench", "kernels", "--plot", str(tmp_path / "a.png")], {}) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "gate up" in capsys.readouterr().out


def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(asked, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert run(["bench", "kernels", "--plot", str(tmp_path / "a.png")], {}) == 2
    assert "pip install 'millpond[plot]'" in capsys.readouterr().err
    assert asked == []


def test_no_steps_at_all_is_one_line_of_error(asked, capsys):
    assert run(["bench", "kernels", "--decode", "", "--prefill", ""], {}) == 1
    assert capsys.readouterr().err.startswith("error: there is no step to measure")
