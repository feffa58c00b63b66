from __future__ import annotations

import threading

import pytest

from millpond.core.request import SamplingParams
from millpond.errors import EngineError
from millpond.lab.asking import Ask, drive
from millpond.lab.bits import first_difference
from millpond.lab.determinism_http import STREAMED, WHOLE, over_http, told_over_http
from millpond.lab.fresh_engine import engine_over
from tiny_engine import ids, make_engine

ASKS = {
    "a": Ask(ids("hello"), SamplingParams(max_tokens=6, logprobs=3)),
    "b": Ask(ids("there"), SamplingParams(max_tokens=4, n=2, seed=5, logprobs=0)),
    "c": Ask(ids("hello there"), SamplingParams(max_tokens=3, prompt_logprobs=1)),
    "d": Ask(ids("plain"), SamplingParams(max_tokens=5, stop=("x",))),
}


def test_what_a_caller_is_told_whole_and_streamed_is_what_the_engine_gave():
    base = make_engine()
    got = drive(base, ASKS)
    heard = over_http(engine_over(base), ASKS)
    assert sorted((each.request, each.how) for each in heard) == sorted(
        [*((name, WHOLE) for name in ASKS), ("a", STREAMED), ("b", STREAMED), ("d", STREAMED)]
    )
    for each in heard:
        assert list(each.answers) == {"b": ["b", "b-1"]}.get(each.request, [each.request])
        for name, told in each.answers.items():
            expected = told_over_http(base.tokenizer, ASKS[each.request], got[name])
            assert first_difference(name, expected, told) is None
            assert len(told.output) == (0 if each.request in "cd" else len(got[name].token_ids))
            assert len(told.prompt) == (len("hello there") - 1 if each.request == "c" else 0)
    assert "millpond-server" not in {thread.name for thread in threading.enumerate()}


def test_a_text_that_is_told_otherwise_is_a_difference():
    base = make_engine()
    got = drive(base, ASKS)
    (heard,) = over_http(engine_over(base), {"c": ASKS["c"]})
    got["c"].text += "!"
    expected = told_over_http(base.tokenizer, ASKS["c"], got["c"])
    assert first_difference("c", expected, heard.answers["c"]).where == "text"


def test_a_request_that_the_server_refuses_ends_it_with_what_was_said():
    with pytest.raises(EngineError, match=r"the server answered 400, .*token id 300"):
        over_http(make_engine(), {"a": Ask([300], SamplingParams())})
    assert "millpond-server" not in {thread.name for thread in threading.enumerate()}
