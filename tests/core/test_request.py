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
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_one_stop_string_is_a_tuple_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
