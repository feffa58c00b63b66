from __future__ import annotations

import json
from random import Random

import pytest

from millpond.core.request import FinishReason, SamplingParams
from millpond.errors import EngineError
from millpond.lab.asking import Ask, drive
from millpond.serve.protocol import CompletionRequest
from tiny_engine import ids, make_engine

ASKS = {
    "a": Ask(ids("hello"), SamplingParams(max_tokens=6, logprobs=2)),
    "b": Ask(ids("there"), SamplingParams(max_tokens=4, n=2, seed=5)),
    "c": Ask(ids("hello there"), SamplingParams(max_tokens=3, prompt_logprobs=1)),
}


def test_every_answer_of_every_request_is_collected_whole():
    got = drive(make_engine(), ASKS)
    assert list(got) == ["a", "b", "b-1", "c"]
    assert [len(each.token_ids) for each in got.values()] == [6, 4, 4, 3]
    assert [len(each.scores) for each in got.values()] == [6, 0, 0, 0]
    assert len(got["c"].prompt_scores) == len("hello there") - 1
    assert {each.finish_reason for each in got.values()} == {FinishReason.LENGTH}


def test_requests_that_arrive_one_by_one_take_more_steps_and_get_the_same():
    at_once, later = make_engine(), make_engine()
    assert drive(later, ASKS, arrivals=Random(0)) == drive(at_once, ASKS)
    assert later.scheduler.counters.iterations > at_once.scheduler.counters.iterations


def test_outputs_of_others_are_passed_over_and_they_hear_whether_more_is_to_come():
    engine, heard = make_engine(), []

    def before_step(more_to_come):
        if not heard:
            engine.add_request("stranger", ids("x"), SamplingParams(max_tokens=20))
        heard.append(more_to_come)

    got = drive(engine, {"a": ASKS["a"]}, arrivals=Random(3), before_step=before_step)
    assert list(got) == ["a"]
    assert heard == sorted(heard, reverse=True)
    assert heard[-1] is False


def test_an_engine_that_does_not_come_to_an_end_is_an_error():
    with pytest.raises(EngineError, match="not drained after 3 steps: 4 requests are unfinished"):
        drive(make_engine(), ASKS, max_steps=3)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=7, temperature=0.0, logprobs=5, ignore_eos=True),
        SamplingParams(n=3, seed=-(2**63), top_k=40, top_p=0.9, min_p=0.1, prompt_logprobs=2),
        SamplingParams(repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5, stop=("x", "y")),
        SamplingParams(logit_bias={5: -2.5, 1: 3.0}, bad_words=("the",), min_tokens=3, allowed_token_ids=(4, 5)),
    ],
)
def test_the_body_over_http_is_read_as_the_same_sampling(sampling):
    body = Ask(ids("hi"), sampling).body()
    read = CompletionRequest.model_validate(json.loads(json.dumps(body)))
    assert (read.prompt, read.sampling(), read.unknown_fields()) == (ids("hi"), sampling, [])
