from __future__ import annotations

import math

import pytest

from millpond.core.request import FinishReason
from millpond.core.step import TokenScore
from millpond.lab.asking import Got
from millpond.lab.bits import Place, Told, bits_of, fingerprint, first_difference, told_by

NEXT = math.nextafter(-1.5, 0)


def told(logprobs=(-0.5, -1.5, -2.5), *, tokens=(7, 8, 9), text="abc", end="length", prompt=(), top=()):
    output = [Place(token, logprob, (1, *top)) for token, logprob in zip(tokens, logprobs, strict=True)]
    return Told(list(prompt), output, text, end)


def test_answers_of_the_same_bits_do_not_differ():
    assert first_difference("r", told(), told()) is None


def test_one_bit_of_a_log_probability_is_a_difference_at_its_position():
    found = first_difference("r", told(), told((-0.5, NEXT, -9.0)))
    assert (found.request, found.where, found.position) == ("r", "output", 1)
    assert (found.expected.logprob, found.got.logprob) == (-1.5, NEXT)
    sides = found.as_json()
    assert (sides["expected"]["bits"], sides["got"]["bits"]) == ("bff8000000000000", "bff7ffffffffffff")


@pytest.mark.parametrize(
    ("other", "where", "position"),
    [
        (told(tokens=(7, 8, 10)), "output", 2),
        (told(tokens=(7, 8), logprobs=(-0.5, -1.5)), "output", 2),
        (told(top=((3, -0.1),)), "output", 0),
        (told(prompt=(Place(4, -0.5),)), "prompt", 1),
        (told(text="abd"), "text", None),
        (told(end="stop"), "end", None),
    ],
    ids=["token", "one fewer", "likeliest", "prompt", "text", "end"],
)
def test_whatever_differs_first_is_named(other, where, position):
    for one, two in ((told(), other), (other, told())):
        found = first_difference("r", one, two)
        assert (found.where, found.position) == (where, position)


def test_a_zero_has_a_sign_and_what_is_no_number_is_itself():
    assert first_difference("r", told((0.0, -1.0, -1.0)), told((-0.0, -1.0, -1.0))).position == 0
    assert first_difference("r", told((math.nan, -1.0, -1.0)), told((math.nan, -1.0, -1.0))) is None
    assert first_difference("r", told(top=((1, 0.0),)), told(top=((1, -0.0),))).position == 0


def test_the_bits_of_a_number_are_its_64():
    assert (bits_of(1.0), bits_of(None)) == ("3ff0000000000000", None)


def test_an_answer_without_scores_is_told_by_its_tokens_and_its_error():
    got = Got([1, 2], "ab", FinishReason.ERROR, error="not finite")
    assert told_by(got) == Told([], [Place(1), Place(2)], "ab", "error: not finite")
    scored = Got([5], "a", FinishReason.STOP, [TokenScore(5, -0.5, 2, ((4, -0.1),))], [TokenScore(3, -1.0, 1, ())])
    assert told_by(scored) == Told([Place(3, -1.0, (1,))], [Place(5, -0.5, (2, (4, -0.1)))], "a", "stop")


def test_a_score_of_another_token_than_the_one_that_came_is_a_difference():
    one, other = (Got([token], "a", FinishReason.STOP, [TokenScore(5, -0.5, 2, ())]) for token in (5, 6))
    assert first_difference("r", told_by(one), told_by(other)).got == Place(6, -0.5, ("scored is 5", 2))


def test_a_fingerprint_is_of_every_bit_and_of_no_order():
    one = {"a": told(), "b": told(text="other")}
    assert fingerprint(one) == fingerprint(dict(reversed(one.items())))
    changed = [told((-0.5, NEXT, -2.5)), told(text="x"), told(end="stop"), told(prompt=(Place(1, -0.5),))]
    assert len({fingerprint({**one, "a": each}) for each in [told(), *changed]}) == 5
