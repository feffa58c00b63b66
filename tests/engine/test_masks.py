"""From a request's words and ids to its mask, and what min_tokens does to the ends of an answer."""

from __future__ import annotations

import pytest

from engine_helpers import answer, text_of
from millpond.core.masks import TokenMask
from millpond.core.request import FinishReason, SamplingParams
from millpond.engine.masks import token_mask
from millpond.errors import InvalidRequestError
from tiny_engine import IM_END, ids, make_engine, tiny_tokenizer


def mask_of(**fields):
    engine = make_engine()
    engine.add_request("a", ids("hi"), SamplingParams(**fields))
    engine.step()
    return engine.runner.admissions[0][2].mask


def test_a_request_that_masks_nothing_has_no_mask():
    assert mask_of() is None
    assert mask_of(temperature=0.5, stop=["x"], stop_token_ids=[7], ignore_eos=True, logprobs=3) is None


def test_the_ends_that_min_tokens_puts_off_are_the_models_and_the_callers():
    ends = tuple(sorted({*tiny_tokenizer().eos_token_ids, 7}))
    assert mask_of(min_tokens=2, stop_token_ids=[7]) == TokenMask(min_tokens=2, end_token_ids=ends)
    assert mask_of(min_tokens=2, stop_token_ids=[7], ignore_eos=True) == TokenMask(min_tokens=2, end_token_ids=(7,))
    assert mask_of(min_tokens=2, ignore_eos=True) is None


def test_ids_and_biases_reach_the_mask_as_they_are():
    assert mask_of(logit_bias={9: 1, 5: -100}) == TokenMask(biases=((5, -100), (9, 1)))
    assert mask_of(allowed_token_ids=[9, 5]) == TokenMask(allowed=(9, 5))


def test_a_bad_word_is_banned_as_the_tokenizer_writes_it_alone_and_behind_a_space():
    tokenizer = tiny_tokenizer()
    spellings = [tuple(tokenizer.encode(text)) for text in ("the", " the", "x", " x")]
    mask = token_mask(SamplingParams(bad_words=["the", "x", "the", " the"]), frozenset(), tokenizer)
    assert mask.banned_runs == tuple(spellings)
    assert len(spellings[0]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {267: 1.0}}, "logit_bias"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [5, 267]}, "allowed_token_ids"),
        ({"stop_token_ids": [267]}, "stop_token_ids"),
        ({"min_tokens": 127, "max_tokens": None}, "min_tokens"),
        ({"min_tokens": 1, "allowed_token_ids": [IM_END]}, "allowed_token_ids"),
        ({"min_tokens": 1, "allowed_token_ids": [7], "stop_token_ids": [7]}, "allowed_token_ids"),
        ({"n": 2}, "n"),
    ],
)
def test_what_this_model_or_this_prompt_cannot_serve_is_refused_by_name(fields, param):
    engine = make_engine()
    with pytest.raises(InvalidRequestError) as refused:
        engine.add_request("a", ids("hi"), SamplingParams(**fields))
    assert refused.value.param == param
    assert not engine.has_unfinished


def test_the_last_id_of_the_vocabulary_is_one():
    assert mask_of(logit_bias={266: 1.0}, allowed_token_ids=[266], stop_token_ids=[266]) is not None


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "a"), (3, "a"), (4, "abcX a"), (8, "abcX a"), (9, "abcX abcX a")],
)
def test_a_stop_string_that_is_complete_with_fewer_than_min_tokens_does_not_count(min_tokens, text):
    outputs = answer(ids("abcX abcX abc"), stop=["bc"], min_tokens=min_tokens, max_tokens=13, ignore_eos=True)
    assert text_of(outputs) == text
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == (13 if min_tokens == 9 else 8 if min_tokens > 3 else 3)


def test_a_stop_string_that_only_begins_early_counts():
    outputs = answer(ids("xyzw"), stop=["yz"], min_tokens=3, max_tokens=4)
    assert (text_of(outputs), outputs[-1].num_output_tokens) == ("x", 3)


def test_a_stop_string_that_was_passed_over_may_overlap_the_one_that_counts():
    outputs = answer(ids("aaab"), stop=["aa"], min_tokens=3, max_tokens=4)
    assert text_of(outputs) == "a"
