from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.serve.sse import EventTemplate, data_event, named_event

TEXTS = st.text() | st.text(st.characters(categories=["Cc", "Cs", "Zl", "Zp"]) | st.sampled_from('"\\/{}'))


@given(name=TEXTS, text=TEXTS)
def test_a_template_gives_the_bytes_of_the_whole_payload(name, text):
    def payload(text):
        return {"model": name, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}

    assert EventTemplate(payload)(text) == data_event(payload(text))


@given(text=TEXTS)
def test_a_template_of_a_named_event_gives_its_bytes_too(text):
    def payload(text):
        return {"type": "piece", "delta": {"text": text}}

    assert EventTemplate(payload, named_event)(text) == named_event(payload(text))
    assert named_event(payload("a")) == b'event: piece\ndata: {"type":"piece","delta":{"text":"a"}}\n\n'


@pytest.mark.parametrize("name", ["\0text\0", '"\0text\0"', "\\u0000text\\u0000"])
def test_a_name_that_looks_like_the_templates_mark_stays_as_it_is(name):
    def payload(text):
        return {"model": name, "text": text, "usage": None}

    assert EventTemplate(payload)("x") == data_event(payload("x"))
