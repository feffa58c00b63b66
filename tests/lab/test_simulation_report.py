from __future__ import annotations

import json

import pytest

from millpond.config import EngineConfig
from millpond.lab.config_plot import draw as draw_configs
from millpond.lab.config_sweep import Grid, sweep_configs
from millpond.lab.cost_model import CostModel
from millpond.lab.latency import Slo
from millpond.lab.simulation_plot import draw
from millpond.lab.simulation_report import figures, pool_figures, relative_errors
from millpond.lab.simulator import simulate
from millpond.lab.workload import WorkloadRequest

A_SECOND = CostModel(1.0, (0.0, 0.0, 0.0, 0.0, 0.0), "a second for every step")
WORKLOAD = [WorkloadRequest(0.0, (0,) * 6, 10)] * 8
CONFIG = EngineConfig(num_blocks=8, block_size=4, max_num_seqs=3, watermark_blocks=0)


@pytest.fixture(scope="module")
def done():
    return simulate(WORKLOAD, CONFIG, A_SECOND)


def report_of(done, slo=Slo()):  # noqa: B008 (frozen)
    return {"simulated": figures(done.latencies, done.counters, slo), "pool": pool_figures(done)}


def test_the_figures_are_those_of_the_run(done):
    found = figures(done.latencies, done.counters, Slo())
    assert (found["requests"], found["seconds"], found["steps"], found["output_tokens"]) == (8, 37.0, 38, 80)
    assert (found["output_tok_s"], found["requests_s"]) == (80 / 37, 8 / 37)
    assert (found["preemptions"], found["thrashed_admissions"]) == (4, 4)
    assert found["recompute_share"] == pytest.approx(36 / 152)
    assert (found["itl_s"]["p50"], found["e2e_s"]["max"], found["goodput"]) == (1.0, 37.0, None)


def test_goodput_stands_with_the_slo_that_it_was_judged_by(done):
    found = figures(done.latencies, done.counters, Slo(ttft=1.0))["goodput"]
    assert (found["ttft"], found["itl"], found["share"]) == (1.0, None, 3 / 8)
    assert found["requests_s"] == 3 / 37


def test_the_pool_is_reported_over_time_and_all_of_it_is_json(done):
    found = report_of(done)["pool"]
    assert (found["num_blocks"], found["most_used_blocks"], found["most_running"], found["most_waiting"]) == (
        8,
        8,
        3,
        6,
    )
    assert 0 < found["mean_used_blocks"] < 8
    assert sum(each["num_preempted"] for each in found["timeline"]) == 4
    json.dumps(report_of(done), allow_nan=False)


def test_errors_are_shares_of_the_real_figures(done):
    real = figures(done.latencies, done.counters, Slo())
    assert set(relative_errors(real, real).values()) == {0.0}
    half = {**real, "output_tok_s": real["output_tok_s"] / 2, "itl_s": {**real["itl_s"], "p99": 3.0}}
    errors = relative_errors(half, {**real, "itl_s": {**real["itl_s"], "p99": 2.0}})
    assert (errors["output_tok_s"], errors["itl_p99"], errors["ttft_p50"]) == (-0.5, 0.5, 0.0)


def test_a_run_of_single_tokens_has_no_itl_and_no_error_of_it():
    one = simulate([WorkloadRequest(0.0, (0,), 1)], CONFIG, A_SECOND)
    found = figures(one.latencies, one.counters, Slo(itl=1.0))
    assert found["itl_s"] == {}
    assert "itl_p99" not in relative_errors(found, found)


@pytest.mark.parametrize("both", [False, True])
def test_the_picture_of_a_run_names_what_it_shows(done, tmp_path, both):
    report = report_of(done, Slo(ttft=2.0))
    draw({**report, "real": report["simulated"]} if both else report, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for name in (
        "the pool of 8 blocks",
        "preemptions",
        "running",
        "waiting",
        "SLO",
        "8 requests in 37 virtual seconds",
    ):
        assert f"<!-- {name}" in text
    assert ("real in orange" in text) is both
    assert text.count('id="TTFT, ') == 1 + both


def test_the_picture_of_a_sweep_names_the_front_the_fields_and_the_advice(tmp_path):
    grid = Grid(pool_tokens=(32, 64), slots=(2, 3), budgets=(64,), block_sizes=(4,), reserves=(0,))
    points = sweep_configs(grid, {1.0: WORKLOAD, 2.0: WORKLOAD}, A_SECOND, Slo())
    draw_configs(points, grid.swept, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for name in ("take a pool of 64 tokens, 3 slots", "pool tokens", "slots", "1/s: a pool of 64 tokens, 3 slots"):
        assert f"<!-- {name}" in text


def test_the_picture_of_one_setting_and_a_trace_needs_no_legend(tmp_path):
    grid = Grid(pool_tokens=(32,), slots=(2,), budgets=(64,), block_sizes=(4,), reserves=(0,))
    draw_configs(sweep_configs(grid, {None: WORKLOAD}, A_SECOND, Slo()), grid.swept, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
