from __future__ import annotations

import json
import threading

import pytest

from tiny_engine import IM_END, ids, make_engine, tiny_tokenizer, tokenizer_with
from tiny_server import NOW, ask, chunks_of, events_of

PATH = "/v1/chat/completions"
AWKWARD = 'a"b\\c\n\0é👩\u2028'
HELLO = [{"role": "user", "content": "hi"}]


def calls_with(arguments):
    return [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]


RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def chat(body=None, engine=None, **settings):
    return ask(engine or make_engine(**settings), PATH, {"model": "tiny", "messages": HELLO, **(body or {})})


def prompt_of(messages, **template):
    """The text that the model is given for these messages."""
    engine = make_engine(tokenizer=tokenizer_with(**template), max_model_len=2000, num_blocks=600)
    response = chat({"messages": messages, "max_tokens": 1}, engine)
    assert response.status_code == 200, response.text
    prompt = engine.runner.admissions[0][2].prompt_token_ids
    return tiny_tokenizer().decode(prompt, skip_special_tokens=False)


def refused(messages):
    # As JSON escapes it, for half of a surrogate pair cannot be sent in any other way.
    response = ask(make_engine(), PATH, json.dumps({"messages": messages}))
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_a_chat_answer_has_the_shape_of_openai():
    response = chat({"max_tokens": 3}, script={"chatcmpl-0": ids("abc")})
    assert response.status_code == 200
    num_prompt_tokens = len(tiny_tokenizer().encode(RENDERED))
    assert response.json() == {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": NOW,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc"},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 3,
            "total_tokens": num_prompt_tokens + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_the_messages_are_rendered_by_the_models_template():
    assert prompt_of(HELLO) == RENDERED


def test_the_template_alone_writes_the_special_tokens():
    for template, prompt in (
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<|im_start|>hi"),
        ("just this", "just this"),
    ):
        assert prompt_of(HELLO, ggml__add_bos_token=True, chat_template=template) == prompt


def test_an_unset_max_tokens_is_what_fits():
    body = chat({"ignore_eos": True}).json()
    assert body["usage"]["total_tokens"] == 128
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "names", [("max_tokens",), ("max_completion_tokens",), ("max_tokens", "max_completion_tokens")]
)
def test_both_names_of_the_limit_are_honoured(names):
    body = chat({"ignore_eos": True, **dict.fromkeys(names, 4)}).json()
    assert body["usage"]["completion_tokens"] == 4


def test_two_limits_that_differ_are_refused():
    response = chat({"max_tokens": 4, "max_completion_tokens": 5})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_does_not_fit_is_refused_under_the_name_it_came_by(name, stream):
    response = chat({name: 10**6, "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


def test_a_conversation_that_is_too_long_names_the_messages():
    response = chat({"messages": [{"role": "user", "content": "x" * 200}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_more_messages_than_any_conversation_has_are_refused_before_each_is_looked_at():
    message = refused([{"role": "user", "content": ""}] * 10_000 + [None])["message"]
    assert "at most 10000" in message


@pytest.mark.parametrize(("count", "off_loop"), [(5, False), (500, True)])
def test_many_messages_are_rendered_off_the_event_loop_however_short(count, off_loop, monkeypatch):
    engine = make_engine()
    threads = []
    original = type(engine.chat_template).render

    def recorded(*args, **settings):
        threads.append(threading.current_thread())
        return original(*args, **settings)

    monkeypatch.setattr(type(engine.chat_template), "render", recorded)
    chat({"messages": [{"role": "user", "content": ""}] * count}, engine)
    assert (threads[0] is not threading.main_thread()) == off_loop


def test_text_parts_are_the_same_prompt_as_their_lines():
    parts = [{"type": "text", "text": "tell me"}, {"type": "text", "text": "a joke"}]
    assert prompt_of([{"role": "user", "content": parts}]) == prompt_of(
        [{"role": "user", "content": "tell me\na joke"}]
    )


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([], "messages[0].content"),
        (None, "messages[0].content"),
        (5, "messages[0].content"),
        ([{"text": "a"}], "messages[0].content[0].type"),
        ([{"type": "text", "text": 123}], "messages[0].content[0].text"),
        ([{"type": "text", "text": [["x"]]}], "messages[0].content[0].text"),
        ([{"type": "image_url", "image_url": {"url": "http://x"}}], "messages[0].content[0].type"),
    ],
)
def test_content_that_is_not_text_is_refused_by_its_place(content, param):
    assert refused([{"role": "user", "content": content}])["param"] == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([*HELLO, {"role": "tool", "content": None}], "messages[1].content"),
        ([*HELLO, {"role": "tool", "content": "hi", "tool_call_id": 5}], "messages[1].tool_call_id"),
        ([*HELLO, {"role": "function", "content": "hi"}], "messages[1].role"),
        ([{"role": "user", "content": "hi", "name": 5}], "messages[0].name"),
        ([*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls[0]"),
        (
            [*HELLO, {"role": "assistant", "tool_calls": calls_with("{")}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([*HELLO, {"role": "assistant", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": "a\0b"}], "messages[0].content"),
        ([*HELLO, {"role": "user", "content": "\udc00"}], "messages[1].content"),
        ([*HELLO, {"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "messages[1].content[0].text"),
    ],
)
def test_messages_that_cannot_be_served_are_refused_by_their_place(messages, param):
    assert refused(messages)["param"] == param


def test_an_answer_can_be_sent_back_as_clients_keep_it():
    kept = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "tool_calls": None,
        "audio": None,
        "annotations": [],
    }
    assert "assistant\nyes<|im_end|>" in prompt_of([*HELLO, kept, *HELLO])


TOOLS_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}{% for call in message.tool_calls or [] %} calls "
    "{{ call.function.name }} with {{ call.function.arguments | tojson }}{% endfor %}"
    "{% if message.tool_call_id %} to {{ message.tool_call_id }}{% endif %}: {{ message.content }}]{% endfor %}"
)


def test_a_history_with_calls_of_tools_reaches_the_template():
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls_with('{"a": 1}')},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "two"}]},
    ]
    assert prompt_of(messages, chat_template=TOOLS_TEMPLATE) == (
        '[user: hi][assistant calls f with {"a": 1}: ][tool to 1: two]'
    )


def test_a_name_that_a_template_writes_is_checked_too():
    template = "{{ messages[0].name }}"
    for name, param in (("a\0", "messages"), ("\ud800", "messages[0].name")):
        body = json.dumps({"messages": [{"role": "user", "content": "hi", "name": name}]})
        response = ask(make_engine(tokenizer=tokenizer_with(chat_template=template)), PATH, body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_what_a_text_part_has_beside_its_text_is_told_or_with_strict_refused():
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "foo": 1, "bar": None}]}]}
    response = chat({"max_tokens": 1, **body})
    assert response.headers["X-Millpond-Warning"] == "unknown fields were ignored: messages[0].content[0].foo"
    response = ask(make_engine(), PATH, body, strict=True)
    assert response.json()["error"]["param"] == "messages[0].content[0].foo"


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ({"name": 5, "arguments": "{}"}, "name"),
        ({"arguments": "{}"}, "name"),
        ({"name": "f", "arguments": [1]}, "arguments"),
    ],
)
def test_a_call_of_a_tool_with_a_wrong_type_is_refused_by_its_place(function, field):
    message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    assert refused([*HELLO, message])["param"] == f"messages[1].tool_calls[0].function.{field}"


@pytest.mark.parametrize(
    ("name", "item"), [("content", {"type": "text", "text": "a"}), ("tool_calls", calls_with("{}")[0])]
)
def test_parts_and_calls_of_all_messages_are_bounded_together(name, item):
    messages = [{"role": "assistant", "content": "a", name: [item] * 3} for _ in range(3334)]
    assert refused(messages)["message"].endswith("at most 10000 items together, got 10002")


def rendered(body, **template):
    engine = make_engine(tokenizer=tokenizer_with(**template), max_model_len=2000, num_blocks=600)
    response = chat({"max_tokens": 1, **body}, engine)
    assert response.status_code == 200, response.text
    return tiny_tokenizer().decode(engine.runner.admissions[0][2].prompt_token_ids, skip_special_tokens=False)


def test_the_assistants_turn_is_left_unopened_where_asked_for():
    assert rendered({"add_generation_prompt": False}) == "<|im_start|>user\nhi<|im_end|>\n"
    assert rendered({"add_generation_prompt": True}) == RENDERED


BEGUN = [*HELLO, {"role": "assistant", "content": "It is "}]


@pytest.mark.parametrize("generation", [None, False])
def test_the_final_message_is_continued_from_its_last_character(generation):
    body = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": generation}
    assert rendered(body) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nIt is "
    assert rendered({"messages": BEGUN}).endswith("It is <|im_end|>\n<|im_start|>assistant\n")


def test_the_final_message_is_continued_though_its_words_were_there_before():
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab"}]
    template = "{% for m in messages %}({{ m.content | trim }}) {% endfor %}ab"
    assert rendered({"messages": messages, "continue_final_message": True}, chat_template=template) == "(ab) (ab"


@pytest.mark.parametrize(
    ("body", "template", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, {}, "continue_final_message"),
        ({"continue_final_message": True}, {"chat_template": "{{ messages[0].role }}"}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": " "}]}, {}, "messages[0].content"),
        ({"continue_final_message": 1}, {}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, {}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, {}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"_steps": 5}}, {}, "chat_template_kwargs._steps"),
        ({"chat_template_kwargs": {"add_generation_prompt": 5}}, {}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"a": "x" * 10**6}}, {}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, {}, "chat_template_kwargs"),
    ],
)
def test_ways_to_render_that_make_no_sense_are_refused_by_name(body, template, param):
    response = chat(body, make_engine(tokenizer=tokenizer_with(**template)))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_further_variables_reach_the_template_whatever_they_are_called():
    template = "{{ self_ }}{{ colour }}{{ messages[0].content }}"
    body = {"chat_template_kwargs": {"self_": "a", "colour": ["red"], "self": 1, "kwargs": 2}}
    assert rendered(body, chat_template=template) == "a['red']hi"


def test_the_templates_own_objection_is_a_400_with_its_words():
    template = "{{ raise_exception('roles must alternate') }}"
    response = chat(engine=make_engine(tokenizer=tokenizer_with(chat_template=template)))
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


def test_a_template_that_yields_nothing_is_a_400():
    response = chat(engine=make_engine(tokenizer=tokenizer_with(chat_template="{# nothing #}")))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a_model_without_a_template_refuses_to_chat():
    response = chat(engine=make_engine(tokenizer=tokenizer_with(chat_template=None)))
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_a_chat_stream_has_one_role_first_and_one_reason_last():
    chunks = chunks_of(chat({"stream": True, "max_tokens": 9}, script={"chatcmpl-0": [*ids("añ!"), IM_END]}))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert [choice["delta"] for choice in choices[1:]] == [{"content": "a"}, {"content": "ñ"}, {"content": "!"}, {}]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert {(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        ("chatcmpl-0", NOW, "chat.completion.chunk", "tiny")
    }


@pytest.mark.parametrize("include_usage", [False, True])
def test_every_event_of_a_stream_is_the_compact_json_of_its_object(include_usage):
    body = {"stream": True, "stream_options": {"include_usage": include_usage}}
    *events, done = events_of(chat(body, script={"chatcmpl-0": [*ids(AWKWARD), IM_END]}))
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert events == [json.dumps(chunk, separators=(",", ":")) for chunk in chunks]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == AWKWARD
    assert [list(chunk)[5:] for chunk in chunks] == [["usage"] * include_usage] * len(chunks)


def test_a_cut_character_ends_in_a_mark_in_both_ways():
    script = {"chatcmpl-0": ids("a€")[:3]}
    body = {"max_tokens": 3}
    chunks = chunks_of(chat({**body, "stream": True}, script=script))
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == chat(body, script=script).json()["choices"][0]["message"]["content"] == "a\ufffd"


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_the_reason_is_length_unless_the_text_ended_by_itself(max_tokens):
    script = {"chatcmpl-0": [*ids("hello"), IM_END, *ids("x")]}
    body = chat({"max_tokens": max_tokens}, script=script).json()
    assert body["choices"][0]["finish_reason"] == ("length" if max_tokens < 6 else "stop")
    assert body["usage"]["completion_tokens"] == min(max_tokens, 6)


@pytest.mark.parametrize("include_usage", [True, False])
def test_stream_totals_are_the_whole_answers_totals(include_usage):
    total = chat({"max_tokens": 4}).json()["usage"]
    chunks = chunks_of(chat({"max_tokens": 4, "stream": True, "stream_options": {"include_usage": include_usage}}))
    if include_usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == total
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("step", [0, 2])
def test_a_failure_in_a_stream_is_one_error_event_and_the_end(step, caplog):
    *chunks, last = events_of(chat({"stream": True}, raises={step: RuntimeError("boom")}))
    assert '"error"' in last
    assert '"server_error"' in last
    assert "[DONE]" not in chunks
    assert all('finish_reason":null' in chunk for chunk in chunks)
