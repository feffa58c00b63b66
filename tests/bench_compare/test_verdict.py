from __future__ import annotations

import pytest

from bench.compare.verdict import FASTER, SAME, SLOWER, UNDECIDED, judge, judge_all, order, rows_of, rule


def verdict_of(ratios, threshold=0.03):
    return judge("decode 1", [100.0] * len(ratios), [100.0 * ratio for ratio in ratios], threshold)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.10, 1.05, 1.08, 1.12, 1.05], FASTER),
        ([0.90, 0.95, 0.92, 0.88, 0.95], SLOWER),
        ([1.10, 1.05, 1.08, 0.99, 1.12], SAME),  # one round on the other side
        ([0.90, 0.95, 0.92, 1.01, 0.91], SAME),
        ([1.02, 1.01, 1.02, 1.02, 1.02], SAME),  # always, but by too little
        ([0.98, 0.99, 0.98, 0.98, 0.98], SAME),
        ([1.0] * 5, SAME),
        ([0.5] * 4, UNDECIDED),  # once in eight times with no difference at all
    ],
)
def test_a_difference_is_one_that_every_round_shows_and_that_is_above_the_threshold(ratios, verdict):
    assert verdict_of(ratios).verdict == verdict


@pytest.mark.parametrize(("threshold", "verdict"), [(0.05, SLOWER), (0.15, SAME)])
def test_the_threshold_is_the_callers(threshold, verdict):
    assert verdict_of([0.9] * 5, threshold).verdict == verdict


def test_of_twelve_rounds_the_outermost_two_do_not_count():
    eleven = [0.90 + 0.005 * i for i in range(11)]
    judged = verdict_of([*eleven, 1.5])
    assert judged.verdict == SLOWER
    assert (judged.low, judged.high) == pytest.approx((0.905, 0.95))
    assert verdict_of([*eleven[1:], 1.5, 1.4]).verdict == SAME
    assert verdict_of([*eleven[1:], 1.5]).verdict == SAME


def test_what_slows_both_runs_of_a_round_down_changes_no_verdict():
    """The machine halves its speed in every other round; the ratios do not see it."""
    judged = judge("prefill 512", [1000.0, 500.0] * 3, [1100.0, 545.0, 1090.0, 550.0, 1090.0, 550.0], 0.03)
    assert judged.verdict == FASTER
    assert judged.ratio == pytest.approx(1.095)
    assert (judged.low, judged.high) == pytest.approx((1.09, 1.1))


def test_the_verdict_keeps_every_rounds_figures():
    judged = judge("W1", [1.0, 2.0], [3.0, 4.0], 0.03)
    assert (judged.name, judged.base_tok_s, judged.new_tok_s) == ("W1", (1.0, 2.0), (3.0, 4.0))


@pytest.mark.parametrize(("base", "new"), [([], []), ([1.0], [1.0, 2.0])])
def test_rounds_that_do_not_pair_up_are_an_error(base, new):
    with pytest.raises(ValueError, match=r"no round|zip"):
        judge("W1", base, new, 0.03)


def test_the_rule_in_words_names_the_threshold():
    assert "more than 3.0%" in rule(0.03)


@pytest.mark.parametrize(("num_rounds", "turns"), [(1, "AB"), (2, "ABBA"), (3, "ABBAAB"), (4, "ABBAABBA")])
def test_the_sides_take_turns_and_neither_is_always_first(num_rounds, turns):
    assert "".join(order(num_rounds, "A", "B")) == turns


def test_every_figure_that_the_command_prints_is_a_row():
    printed = {"decode_tok_s": {"1": 200.0, "16": 900.5}, "prefill_tok_s": {"512": 2000.0}, "w1_output_tok_s": 530.0}
    assert rows_of(printed) == {"decode 1": 200.0, "decode 16": 900.5, "prefill 512": 2000.0, "W1": 530.0}
    assert rows_of({"decode_tok_s": {}, "prefill_tok_s": {}, "w1_output_tok_s": None}) == {}


def test_a_row_that_only_one_side_has_is_left_out():
    runs = {"base": [{"a": 1.0}, {"a": 1.0}], "new": [{"b": 1.0, "a": 2.0}, {"b": 1.0, "a": 4.0}]}
    (judged,) = judge_all(runs, 0.03)
    assert (judged.name, judged.ratio) == ("a", 3.0)
