from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import InvalidRequestError
from millpond.text.stop import StopStrings

AB = st.text("ab", min_size=1, max_size=5)


def run(stops: StopStrings, deltas: list[str]) -> list[str]:
    return [*(stops.push(delta) for delta in deltas), stops.finish()]


def answer_by_definition(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """Look at every place where a stop string could be complete, from the left."""
    for end in range(1, len(text) + 1):
        found = [each for each in stop if text[:end].endswith(each)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(text=st.text("ab", max_size=20), stop=st.lists(AB, max_size=4), cuts=st.lists(st.integers(0, 20)))
@pytest.mark.parametrize("include", [False, True])
def test_the_text_ends_where_the_definition_says_whatever_the_pieces(include, text, stop, cuts):
    edges = [0, *sorted(cuts), len(text)]
    stops = StopStrings(stop, include)
    joined = "".join(run(stops, [text[a:b] for a, b in pairwise(edges)]))
    assert (joined, stops.matched) == answer_by_definition(text, stop, include)


@given(text=st.text("ab", max_size=20), stop=st.lists(AB, max_size=4))
def test_what_is_held_back_is_the_longest_end_that_may_become_a_stop_string(text, stop):
    stops = StopStrings(stop)
    given_out = stops.push(text)
    if not stops.stopped:
        ends = [text[-n:] for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) for s in stop)]
        assert text.removeprefix(given_out) == max(ends, key=len, default="")


def test_a_stop_string_that_starts_and_ends_inside_deltas_is_found():
    stops = StopStrings(["lo wor"])
    assert run(stops, ["Hel", "lo", " ", "world"]) == ["He", "l", "", "", ""]
    assert stops.stopped


def test_the_earlier_in_the_text_wins_though_listed_later():
    stops = StopStrings(["world", "lo"])
    assert stops.push("Hello world") == "Hel"
    assert stops.matched == "lo"


@pytest.mark.parametrize("stop", [["lo", "llo"], ["llo", "lo"]])
def test_of_those_that_end_together_the_longest_wins(stop):
    stops = StopStrings(stop)
    assert stops.push("Hello world") == "He"
    assert stops.matched == "llo"


def test_the_text_ends_right_after_the_stop_string_when_it_is_included():
    assert StopStrings(["lo"], include=True).push("Hello world") == "Hello"


def test_a_stop_string_at_the_very_start_leaves_an_empty_text():
    stops = StopStrings(["He"])
    assert run(stops, ["Hello"]) == ["", ""]
    assert stops.stopped


def test_nothing_comes_after_the_stop():
    stops = StopStrings(["x"])
    assert run(stops, ["ax", "b", "xc"]) == ["a", "", "", ""]


def test_only_what_may_become_a_stop_string_is_held_back_and_no_longer_than_that():
    stops = StopStrings(["\n\nUser:"])
    assert [stops.push(delta) for delta in ("a\n", "\nUs", "eless", "\n")] == ["a", "", "\n\nUseless", ""]
    assert stops.finish() == "\n"
    assert not stops.stopped


def test_finish_gives_the_rest_once():
    stops = StopStrings(["abc"])
    assert (stops.push("ab"), stops.finish(), stops.finish()) == ("", "ab", "")


def test_without_stop_strings_everything_passes():
    assert run(StopStrings([]), ["a", "", "b"]) == ["a", "", "b", ""]


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(InvalidRequestError, match="non-empty") as caught:
        StopStrings(stop)
    assert caught.value.param == "stop"
