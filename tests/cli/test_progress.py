from __future__ import annotations

import io

import pytest
from rich.console import Console

from millpond.cli.progress import advancing_bar, counting_bar, download_bar


def console(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)


def test_a_download_is_one_line_for_each_part_where_nobody_watches():
    quiet = console(is_terminal=False)
    with download_bar(quiet) as report:
        report(0, None, "downloading a")
        report(50, 100, "downloading a")
        report(1, 100, "unpacking b")
    assert quiet.file.getvalue() == "downloading a\nunpacking b\n"


def test_a_download_is_a_bar_with_both_sizes_on_a_terminal():
    watched = console(is_terminal=True)
    with download_bar(watched) as report:
        report(3 * 2**20, 8 * 2**20, "downloading a")
    assert "3.0/8.0 MiB" in watched.file.getvalue()


def test_nothing_is_shown_where_nothing_is_fetched():
    quiet = console(is_terminal=False)
    with download_bar(quiet):
        pass
    assert quiet.file.getvalue() == ""


def test_the_counting_bar_shows_what_is_done_and_names_what_is_under_way():
    watched = console(is_terminal=True)
    with counting_bar(3, watched) as start:
        start("first")
        start("second")
    assert "second" in watched.file.getvalue()
    assert "1/3" in watched.file.getvalue()
    assert "2/3" not in watched.file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_advancing_bar_shows_how_much_is_done_and_nothing_where_nobody_watches(is_terminal):
    shown = console(is_terminal=is_terminal)
    with advancing_bar(1000, "requests", shown) as report:
        report(250)
    assert ("250/1000" in shown.file.getvalue()) is is_terminal
    assert bool(shown.file.getvalue()) is is_terminal
