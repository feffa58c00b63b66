from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from helpers import make_scheduler
from millpond.lab.batch_run import Row
from millpond.lab.batchbench import BatchBench
from millpond.lab.batching_plot import LOOKS, WAITING, draw_run, draw_timeline, figure_of, spans_of
from millpond.lab.stepping import ChecksumRunner
from millpond.lab.workload import WorkloadRequest

PREFILL, DECODE, DEAD, RECOMPUTE = (LOOKS[kind] for kind in (Row.PREFILL, Row.DECODE, Row.DEAD, Row.RECOMPUTE))


def runs_of(*lengths, **sizes):
    """The static and the continuous run of requests of (prompt tokens, output tokens)."""
    requests = tuple(WorkloadRequest(0.0, (index + 1,) * prompt, out) for index, (prompt, out) in enumerate(lengths))
    runner = ChecksumRunner()
    return BatchBench(make_scheduler(**sizes), runner, runner.clock, requests).compare()


def test_a_static_row_waits_runs_and_is_dead_to_the_end_of_its_batch():
    static, _ = runs_of((4, 5), (4, 2), (4, 3), slots=2)
    assert spans_of(static) == [
        {PREFILL: [(0, 1)], DECODE: [(1, 4)]},
        {PREFILL: [(0, 1)], DECODE: [(1, 1)], DEAD: [(2, 3)]},
        {WAITING: [(0, 5)], PREFILL: [(5, 1)], DECODE: [(6, 2)]},
    ]


def test_a_preempted_row_waits_again_and_is_computed_again():
    _, continuous = runs_of((4, 4), (4, 4), num_blocks=2, slots=2)
    assert spans_of(continuous) == [
        {PREFILL: [(0, 1)], DECODE: [(1, 3)]},
        {PREFILL: [(0, 1)], WAITING: [(1, 3)], RECOMPUTE: [(4, 1)], DECODE: [(5, 2)]},
    ]


def test_a_line_ends_each_static_batch_but_the_last_and_none_a_continuous_one():
    places = []
    for run in runs_of((4, 5), (4, 2), (4, 3), (4, 4), (4, 1), slots=2):
        axes = Figure().subplots()
        draw_run(axes, run, run.duration)
        places.append([line.get_xdata()[0] for line in axes.lines])
    assert places == [[5, 9], []]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, name, start):
    draw_timeline(*runs_of((4, 5), (4, 2)), "step", "two requests", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_picture_says_what_both_policies_cost(tmp_path):
    draw_timeline(*runs_of((4, 5), (4, 2), (4, 3), slots=2), "step", "three requests", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for name in (
        "three requests",
        "static, 2 batches: 8 steps, 1.25 tokens/step, 14% of 22 positions wasted,",
        "continuous: 5 steps, 2 tokens/step, 0% of 19 positions wasted,",
        "dead: done, and waits for its batch",
        "answer delivered",
    ):
        assert f"<!-- {name} -->" in text
    assert "computed again" not in text  # nothing was preempted


def test_figures_have_three_digits_or_all_before_the_point():
    assert [figure_of(value) for value in (0.12345, 5.0, 33.333, 100.4, 12034.2)] == [
        "0.123",
        "5",
        "33.3",
        "100",
        "12034",
    ]
