from __future__ import annotations

from array import array

import pytest

from millpond.lab.latency import Slo
from millpond.lab.load_client import LoadRecord
from millpond.lab.load_plot import draw
from millpond.lab.load_report import figures
from millpond.lab.load_test import LoadRun


def record(index, *pieces, error=None):
    ended = pieces[-1] if pieces else index + 1.0
    sent = index + 0.25
    return LoadRecord(index, index, 5, 4, index + 0.125, sent, ended, array("d", pieces), error=error)


RUN = LoadRun((record(0, 0.5, 1.0, 1.5), record(1, 2.0, 2.0), record(2, error="cut")), 0.1)
LONE = LoadRun((record(0, 0.5),), 0.1)
BROKEN = LoadRun((record(0, error="timeout"),), 0.1)


@pytest.mark.parametrize("run", [RUN, LONE, BROKEN])
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_a_picture_is_written_in_the_format_of_its_name_whatever_there_is_to_draw(tmp_path, run, name, start):
    draw(run, figures(run, Slo(1.0, None)), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_picture_has_the_spread_the_bound_and_where_requests_failed(tmp_path):
    draw(RUN, figures(RUN, Slo(1.0, None)), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for name in ("TTFT, 2 of them", "ITL, 3 of them", "p50 750 ms", "requests under way", "3 requests in 3.0 s"):
        assert f"<!-- {name}" in text or f"<!--  {name}" in text
    for mark in ("TTFT p50", "TTFT p99", "TTFT SLO", "ITL p99", "failed"):
        assert f'id="{mark}"' in text
    assert 'id="ITL SLO"' not in text
