from __future__ import annotations

import pytest

from millpond.lab.picture import apart, new_figure, save


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, name, start):
    save(new_figure(2, 1), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("scale", "places"),
    [("linear", [(0, 0), (0.5, 2), (9, 0.1), (0, 5), (0.5, 6)]), ("log", [(0, 1), (0, 2), (5, 1), (5, 10), (10, 10)])],
)
def test_a_label_has_room_where_no_earlier_one_is_near_in_both_directions(scale, places):
    axes = new_figure(4, 4).subplots()
    axes.set(yscale=scale, xlim=(0, 10), ylim=(1e-1 if scale == "log" else 0, 100 if scale == "log" else 10))
    assert apart(axes, places, 0.2, 0.3) == [True, False, True, True, scale == "log"]
