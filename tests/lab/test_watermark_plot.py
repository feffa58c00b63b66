from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from millpond.lab.arrivals import Traffic
from millpond.lab.batchbench import WatermarkSweep, choose_reserve, sweep_watermarks
from millpond.lab.faults import WithoutWaiver
from millpond.lab.lengths import Lengths
from millpond.lab.wall import wall_moments
from millpond.lab.watermark_plot import AUTO_COLOUR, CHOSEN, draw_cost, draw_moments, draw_sweep, runs_of


@pytest.fixture
def points():
    requests = Traffic(num_requests=8, prompt_tokens=Lengths((6,)), max_tokens=Lengths((10,))).requests()
    sweep = WatermarkSweep(requests=requests, num_blocks=8, block_size=4, max_num_seqs=3)
    return sweep_watermarks(sweep, [0, 1, 2, 3])


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, points, name, start):
    draw_sweep(points, *choose_reserve(points), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_picture_shows_the_three_costs_the_choice_and_the_wall_with_and_without_the_waiver(tmp_path, points):
    draw_sweep(points, *choose_reserve(points), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for name in ("preemptions", "thrashed admissions", "recompute share", "iterations", "reserve 3: against reserve 0"):
        assert f"<!-- {name}" in text
    for name in ("with the waiver", "without it", "the reserve is waived, b runs", "leaves 3: b waits for ever"):
        assert text.count(f"<!-- {name}") == 1
    for step in (0, 8, 9, 16):
        assert text.count(f"<!-- step {step} -->") == 2


def test_auto_is_a_line_and_a_point_of_its_own_and_green_where_it_is_chosen(tmp_path, points):
    auto = replace(points[2], watermark_blocks="auto", iterations=38)
    for all_points in ([*points, auto], [auto]):
        draw_sweep(all_points, *choose_reserve(all_points), tmp_path / "a.svg")
        text = (tmp_path / "a.svg").read_text()
        assert text.count("<!-- auto -->") == 3
        assert "<!-- reserve auto: " in text
    dull = replace(auto, forward_tokens=1000)
    draw_sweep([*points, dull], *choose_reserve([*points, dull]), tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text().count(AUTO_COLOUR) >= 6
    assert AUTO_COLOUR not in text


def drawn(points, chosen, value):
    """The marks of one panel: where, how large, and the labels."""
    axes = Figure().subplots()
    draw_cost(axes, points, chosen, "name", value)
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    places = [(line.get_xdata()[0], line.get_ydata()[0], line.get_color() == CHOSEN) for line in marks]
    return places, [text.get_text() for text in axes.texts]


def test_each_reserve_is_a_point_at_its_iterations_and_the_chosen_one_stands_out(points):
    places, labels = drawn(points, points[3], lambda point: point.preemptions)
    assert places == [(38, 4, False), (41, 3, False), (41, 1, False), (41, 0, True)]
    assert labels == ["0", "1", "2", "3"]


def test_points_in_one_place_share_a_label(points):
    same = [points[3], points[0], replace(points[3], watermark_blocks=4)]
    places, labels = drawn(same, points[0], lambda point: point.preemptions)
    assert places == [(38, 4, True), (41, 0, False)]
    assert labels == ["0", "3-4"]


def test_the_wall_hatches_the_free_blocks_that_the_reserve_keeps_back():
    axes = Figure().subplots()
    draw_moments(axes, wall_moments(WithoutWaiver), "without it")
    blocks = [axes.patches[first : first + 6] for first in range(0, 24, 6)]
    assert [sum(block.get_hatch() is not None for block in six) for six in blocks] == [3, 0, 2, 3]
    assert [text.get_text() for text in axes.texts].count("b") == 1 + 3


def test_a_sweep_of_one_reserve_without_preemptions_can_be_drawn(tmp_path, points):
    draw_sweep(points[3:], points[3], "why", tmp_path / "a.svg")
    assert "<!-- recompute share" in (tmp_path / "a.svg").read_text()


def test_numbers_that_follow_one_another_are_a_run():
    assert [runs_of(numbers) for numbers in ([3], [0, 1], [0, 2, 3, 4, 9])] == ["3", "0-1", "0, 2-4, 9"]
