from __future__ import annotations

from random import Random
from statistics import median

import pytest

from millpond.lab.lengths import Lengths

LOGNORMAL = Lengths(range(1, 301), drawn=True, median=100, sigma=0.8)


def test_lengths_go_in_turn_or_are_drawn_from_both_ends():
    assert Lengths((4, 10)).of(5, Random(0)) == [4, 10, 4, 10, 4]
    drawn = Lengths(range(4, 7), drawn=True).of(100, Random(0))
    assert set(drawn) == {4, 5, 6}


def test_lognormal_lengths_lie_around_their_median_and_stop_at_both_ends():
    found = LOGNORMAL.of(4000, Random(0))
    assert median(found) == pytest.approx(100, rel=0.05)
    assert max(found) == 300
    assert sum(each == 300 for each in found) > 100
    assert min(Lengths(range(1, 9), drawn=True, median=2, sigma=3.0).of(100, Random(0))) == 1


@pytest.mark.parametrize(
    ("lengths", "text", "longest"),
    [
        (Lengths((6,)), "6", 6),
        (Lengths((10, 4)), "10,4", 10),
        (Lengths(range(4, 17), drawn=True), "4-16", 16),
        (LOGNORMAL, "lognormal:100:0.8:300", 300),
    ],
)
def test_lengths_are_written_as_they_are_read_and_know_their_longest(lengths, text, longest):
    assert (str(lengths), lengths.longest) == (text, longest)
