from dataclasses import replace
from itertools import product

import pytest

from helpers import make_request
from millpond.core.request import LEGAL_EDGES, RequestState, SamplingParams
from millpond.errors import InvalidRequestError, InvariantError

WAITING, RUNNING, FINISHED = RequestState
LEGAL = {(WAITING, RUNNING), (WAITING, FINISHED), (RUNNING, WAITING), (RUNNING, FINISHED)}


def test_the_table_has_every_state():
    assert set(LEGAL_EDGES) == set(RequestState)


@pytest.mark.parametrize(("before", "after"), sorted(LEGAL, key=str))
def test_a_legal_edge_is_followed(before, after):
    request = make_request("a", state=before)
    request.move_to(after)
    assert request.state is after


@pytest.mark.parametrize(("before", "after"), sorted(set(product(RequestState, repeat=2)) - LEGAL, key=str))
def test_any_other_edge_raises_and_changes_nothing(before, after):
    request = make_request("a", state=before)
    with pytest.raises(InvariantError, match=f"request a: {before.value} -> {after.value} is not a legal edge"):
        request.move_to(after)
    assert request.state is before


@pytest.mark.parametrize(("start", "end"), [(start, end) for end in range(6) for start in range(end + 1)])
def test_tokens_between_two_positions_run_over_prompt_and_output(start, end):
    request = make_request("a", 3)
    request.output_token_ids += [7, 8]
    assert request.token_ids_between(start, end) == (*request.prompt_token_ids, 7, 8)[start:end]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("stop", 5),
        ("stop", b"ab"),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("ignore_eos", "no"),
        ("ignore_eos", None),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", 0),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", 1.0),
        ("stop", ("a",) * 17),
        ("stop", "a" * 1001),
        ("stop", "a\ud800"),
        ("stop_token_ids", (5,) * 1001),
        ("bad_words", ("",)),
        ("bad_words", (5,)),
        ("bad_words", ("a",) * 129),
        ("bad_words", ("a" * 2049, "b" * 2048)),
        ("bad_words", "\udfff"),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: -101}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: None}),
        ("logit_bias", [5]),
        ("logit_bias", 5),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (1.5,)),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", "5"),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 21),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_what_is_listed_or_mapped_cannot_change_any_more_and_may_be_given_again():
    given = {7: -100, 5: 1.5}
    sampling = SamplingParams(logit_bias=given, bad_words="x", allowed_token_ids=[5, 7])
    given[5] = 9
    assert (sampling.logit_bias, sampling.bad_words, sampling.allowed_token_ids) == (
        ((5, 1.5), (7, -100)),
        ("x",),
        (5, 7),
    )
    assert replace(sampling, top_k=3).logit_bias == sampling.logit_bias


def test_as_many_choices_as_asked_for_have_seeds_that_follow_one_another():
    alone, three = SamplingParams(seed=2**64 - 2), SamplingParams(seed=2**64 - 2, n=3)
    assert alone.choices() == (alone,)
    assert three.choices() == tuple(SamplingParams(seed=seed) for seed in (2**64 - 2, 2**64 - 1, 0))
    assert SamplingParams(n=2).choices() == (SamplingParams(), SamplingParams())


def test_one_stop_string_is_a_tuple_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
