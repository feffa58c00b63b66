from __future__ import annotations

import copy

import pytest

from millpond.errors import InvalidRequestError
from millpond.text.messages import normalize_messages


def content_of(content: object) -> object:
    return normalize_messages([{"role": "user", "content": content}])[0]["content"]


def call(arguments: object) -> list[dict]:
    return [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}]


def text(value: object) -> dict:
    return {"type": "text", "text": value}


def test_text_parts_are_joined_by_a_newline():
    assert content_of("tell me\na joke") == content_of([text("tell me"), text("a joke")]) == "tell me\na joke"
    assert content_of([text("alone")]) == "alone"


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        (None, "messages[0].content", "got null"),
        (5, "messages[0].content", "got 5"),
        ([], "messages[0].content", "got an empty list"),
        (["x"], "messages[0].content[0]", "must be an object, got str"),
        ([text("a"), {"text": "b"}], "messages[0].content[1].type", "is None; only 'text'"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0].type", "'image_url'"),
        ([text(123)], "messages[0].content[0].text", "got int"),
        ([text([["x"]])], "messages[0].content[0].text", "got list"),
        ([text(None)], "messages[0].content[0].text", "got NoneType"),
    ],
)
def test_content_that_is_no_text_is_refused_by_its_place(content, param, message):
    with pytest.raises(InvalidRequestError) as caught:
        content_of(content)
    assert (caught.value.param, message in str(caught.value)) == (param, True)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}], "messages[1].role"),
        ([{"role": ["user"], "content": "b"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
    ],
)
def test_messages_of_the_wrong_shape_are_refused_by_their_place(messages, param):
    with pytest.raises(InvalidRequestError) as caught:
        normalize_messages(messages)
    assert caught.value.param == param


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_every_known_role_is_taken(role):
    assert normalize_messages([{"role": role, "content": "x"}]) == [{"role": role, "content": "x"}]


@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_an_assistant_that_calls_tools_may_say_nothing(message):
    [result] = normalize_messages([{"role": "assistant", "tool_calls": call("{}"), **message}])
    assert result["content"] == ""


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "user", "tool_calls": call("{}")}])
def test_nobody_else_may_say_nothing(message):
    with pytest.raises(InvalidRequestError, match="got null"):
        normalize_messages([{"content": None, **message}])


def test_arguments_of_tool_calls_become_objects():
    [result] = normalize_messages([{"role": "assistant", "tool_calls": call('{"a": [1]}')}])
    assert result["tool_calls"] == call({"a": [1]})


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        (call("{"), "messages[0].tool_calls[0].function.arguments"),
        (call("[1]"), "messages[0].tool_calls[0].function.arguments"),
        ([*call("{}"), "x"], "messages[0].tool_calls[1]"),
        ([{"function": None}], "messages[0].tool_calls[0]"),
        ([], "messages[0].tool_calls"),
        ("x", "messages[0].tool_calls"),
    ],
)
def test_malformed_tool_calls_are_refused_by_their_place(calls, param):
    with pytest.raises(InvalidRequestError) as caught:
        normalize_messages([{"role": "assistant", "content": "x", "tool_calls": calls}])
    assert caught.value.param == param


def test_other_keys_pass_through_and_nulls_are_dropped():
    [result] = normalize_messages([{"role": "tool", "content": "4", "tool_call_id": "call_1", "name": None}])
    assert result == {"role": "tool", "content": "4", "tool_call_id": "call_1"}


def test_the_given_messages_are_not_changed():
    messages = [{"role": "assistant", "content": None, "tool_calls": call('{"a": 1}')}]
    before = copy.deepcopy(messages)
    normalize_messages(messages)
    assert messages == before
