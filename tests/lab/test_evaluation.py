from __future__ import annotations

import math

import pytest

from helpers import scripted_score
from millpond.errors import ConfigError, EngineError, InvalidRequestError
from millpond.lab.evaluation import Estimate, Perplexity, WindowPlan, score_windows, text_tokens
from tiny_engine import make_engine, tiny_tokenizer, tokenizer_with

LETTERS = list(range(10, 35))


def test_windows_lie_side_by_side_and_leave_out_the_end():
    assert WindowPlan(context=8).cut(LETTERS) == [LETTERS[:8], LETTERS[8:16], LETTERS[16:24]]


def test_a_text_of_one_window_is_one():
    assert WindowPlan(context=25).cut(LETTERS) == [LETTERS]


def test_with_a_stride_a_window_begins_every_so_many_tokens():
    assert WindowPlan(context=8, stride=6).cut(LETTERS) == [LETTERS[:8], LETTERS[6:14], LETTERS[12:20]]


def test_no_more_windows_are_cut_than_are_asked_for():
    assert WindowPlan(context=8, num_windows=2).cut(LETTERS) == [LETTERS[:8], LETTERS[8:16]]


@pytest.mark.parametrize(("context", "stride", "counted"), [(8, None, [5, 6, 7]), (7, None, [4, 5, 6]), (8, 2, [6, 7])])
def test_the_tokens_that_count(context, stride, counted):
    assert list(WindowPlan(context=context, stride=stride).counted) == counted


def test_with_a_stride_every_token_behind_the_first_windows_own_counts_once():
    plan = WindowPlan(context=8, stride=3)
    places = [3 * number + place for number, _ in enumerate(plan.cut(LETTERS)) for place in plan.counted]
    assert places == list(range(5, 5 + len(places)))


def test_a_text_without_a_window_is_refused_with_both_numbers():
    with pytest.raises(InvalidRequestError, match="25 tokens, fewer than one window of 26"):
        WindowPlan(context=26).cut(LETTERS)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"context": 3}, "at least 4 tokens, got a context of 3"),
        ({"context": 8, "stride": 8}, "from 1 to 7"),
        ({"context": 8, "stride": 0}, "from 1 to 7"),
        ({"num_windows": 0}, "got 0"),
    ],
)
def test_plans_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        WindowPlan(**wrong)


def test_the_scores_are_those_of_the_tokens_that_count():
    engine, plan, told = make_engine(max_num_seqs=2, num_blocks=16), WindowPlan(context=6), []
    found = score_windows(engine, plan.cut(LETTERS), plan.counted, told.append)
    assert found == [
        [scripted_score(token_id, 0).logprob for token_id in each] for each in ([14, 15], [20, 21], [26, 27], [32, 33])
    ]
    assert told == [1, 2, 3, 4]
    assert not engine.has_unfinished


def test_windows_run_together_and_never_more_than_have_slots():
    engine, plan = make_engine(max_num_seqs=3), WindowPlan(context=5)
    steps = []
    engine.observer = lambda stats: steps.append((stats.num_scheduled, stats.num_waiting))
    score_windows(engine, plan.cut(LETTERS), plan.counted)
    assert max(steps) == (3, 0)


def test_a_window_begins_with_bos_where_the_models_texts_do():
    tokenizer = tokenizer_with(ggml__add_bos_token=True, ggml__bos_token_id=1)
    engine, plan = make_engine(tokenizer=tokenizer), WindowPlan(context=6, num_windows=2)
    score_windows(engine, plan.cut(LETTERS), plan.counted)
    prompts = [admission.prompt_token_ids for _, _, admission in engine.runner.admissions]
    assert prompts == [(1, *LETTERS[1:6]), (1, *LETTERS[7:12])]


def test_a_text_begins_with_bos_once_and_has_no_end():
    marked = tokenizer_with(
        ggml__add_bos_token=True, ggml__bos_token_id=1, ggml__add_eos_token=True, ggml__eos_token_id=2
    )
    plain = tiny_tokenizer().encode("hello", add_special_tokens=False)
    assert text_tokens(marked, "hello") == [1, *plain]
    assert text_tokens(marked, "<|im_start|>hello") == [1, *plain]
    assert text_tokens(tiny_tokenizer(), "hello") == plain


def test_windows_without_room_are_refused_before_anything_runs():
    engine = make_engine(max_model_len=9)
    with pytest.raises(ConfigError, match=r"a window of 9 tokens .* at most 8"):
        score_windows(engine, [LETTERS[:9]], range(5, 9))
    score_windows(engine, [LETTERS[:8]], range(5, 8))


def test_a_window_that_fails_ends_the_evaluation_and_leaves_nothing_behind():
    engine, plan = make_engine(faults={"0": 0}, max_num_batched_tokens=8), WindowPlan(context=6)
    with pytest.raises(EngineError, match="window 0 of 4 could not be scored: the logits are not finite"):
        score_windows(engine, plan.cut(LETTERS), plan.counted)
    assert not engine.unfinished_ids


def test_the_perplexity_of_one_in_four_is_four():
    assert Perplexity.of([math.log(0.25)] * 3) == Perplexity(pytest.approx(4.0), 0.0, 3)


def test_an_estimate_is_the_mean_with_its_standard_error():
    estimate = Estimate.of([1.0, 2.0, 3.0, 6.0])
    assert estimate.mean == 3.0
    assert estimate.error == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 4 / 3))
    assert Estimate.of([5.0]) == Estimate(5.0, 0.0)


def test_a_perplexity_that_no_number_holds_is_infinite():
    assert Perplexity.of([-1e5, -2e5]) == Perplexity(math.inf, math.inf, 2)
