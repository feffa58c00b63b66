"""Over HTTP an engine that guesses gives the same answers; a frame may carry the text of several tokens."""

from __future__ import annotations

import pytest

from millpond.core.speculation import PromptLookup
from tiny_engine import ids, make_engine
from tiny_server import ask, chunks_of

SCRIPT = ids("one two one two one two one two three")


def answer(drafter, body):
    engine = make_engine(script={"cmpl-0-0": SCRIPT}, drafter=drafter)
    response = ask(engine, "/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 36, **body})
    return response, engine.runner


@pytest.mark.parametrize("body", [{}, {"stop": "two o"}, {"max_tokens": 11}, {"stop": ["three"]}])
def test_a_whole_answer_and_its_usage_are_the_same(body):
    plain, slow = answer(None, body)
    guessed, fast = answer(PromptLookup(8), body)
    assert guessed.json() == plain.json()
    assert len(fast.outputs) <= len(slow.outputs)


def test_a_streamed_answer_has_the_same_text_and_usage_in_fewer_frames():
    body = {"stream": True, "stream_options": {"include_usage": True}}
    plain, guessed = (chunks_of(answer(drafter, body)[0]) for drafter in (None, PromptLookup(8)))
    assert text_of(guessed) == text_of(plain) == "one two one two one two one two thre"
    assert guessed[-1]["usage"] == plain[-1]["usage"]
    assert len(guessed) < len(plain)


def text_of(chunks):
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
