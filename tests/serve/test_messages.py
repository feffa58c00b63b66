from __future__ import annotations

import json

import pytest

from millpond.serve.errors import anthropic_body, error_body
from millpond.serve.refusals import ANTHROPIC, ANTHROPIC_MESSAGES
from tiny_engine import IM_END, ids, make_engine, run, tiny_tokenizer, tokenizer_with
from tiny_server import ask, named_events_of, started

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NUM_PROMPT_TOKENS = len(tiny_tokenizer().encode(RENDERED))
AWKWARD = 'a"b\\c\né👩\u2028'
TOOLS_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}{% for call in message.tool_calls or [] %} calls "
    "{{ call.id }} {{ call.function.name }} with {{ call.function.arguments | tojson }}{% endfor %}"
    "{% if message.tool_call_id %} to {{ message.tool_call_id }}{% endif %}: {{ message.content }}]{% endfor %}"
)
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}


def texts(*parts):
    return [{"type": "text", "text": part} for part in parts]


def post(body=None, engine=None, path=PATH, app=None, **settings):
    """As JSON escapes it, for half of a surrogate pair cannot be sent in any other way."""
    whole = {"model": "tiny", "max_tokens": 20, "messages": HELLO, **(body or {})}
    return ask(engine or make_engine(**settings), path, json.dumps(whole), **(app or {}))


def count(body=None, **settings):
    whole = {"messages": HELLO, **(body or {})}
    return ask(make_engine(**settings), f"{PATH}/count_tokens", whole)


def prompt_of(body, **template):
    """The text that the model is given."""
    engine = make_engine(tokenizer=tokenizer_with(**template), max_model_len=2000, num_blocks=600)
    response = post({"max_tokens": 1, **body}, engine)
    assert response.status_code == 200, response.text
    return tiny_tokenizer().decode(engine.runner.admissions[0][2].prompt_token_ids, skip_special_tokens=False)


def refused(body, **settings):
    """The message of a 400 in Anthropic's shape, which has nothing else."""
    response = post(body, **settings)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": answer["error"]["message"]},
    }
    return answer["error"]["message"]


def test_an_answer_has_the_shape_of_anthropic():
    assert post(script={"msg_0": [*ids("abc"), IM_END]}).json() == {
        "id": "msg_0",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "abc"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": NUM_PROMPT_TOKENS,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
        },
    }


def test_a_stream_has_the_events_of_anthropic_in_their_order():
    events = named_events_of(post({"stream": True}, script={"msg_0": [*ids("añ"), IM_END]}))
    usage = {"input_tokens": NUM_PROMPT_TOKENS, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    start = {"id": "msg_0", "type": "message", "role": "assistant", "model": "tiny", "content": []}
    end = {"stop_reason": None, "stop_sequence": None}
    assert events == [
        {"type": "message_start", "message": {**start, **end, "usage": {**usage, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ñ"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {**usage, "output_tokens": 4},
        },
        {"type": "message_stop"},
    ]


ENDS = {
    "its own end": ([*ids("hello"), IM_END], {}, "hello", "end_turn", None),
    "an awkward text": ([*ids(AWKWARD), IM_END], {"max_tokens": 40}, AWKWARD, "end_turn", None),
    "nothing at all": ([IM_END], {}, "", "end_turn", None),
    "the limit": (ids("hello"), {"max_tokens": 3}, "hel", "max_tokens", None),
    "a stop sequence": (ids("hello"), {"stop_sequences": ["x", "lo"]}, "hel", "stop_sequence", "lo"),
    "a stop sequence at the limit": (
        ids("hello"), {"stop_sequences": ["lo"], "max_tokens": 5}, "hel", "stop_sequence", "lo"
    ),
    "a stop sequence that has only begun": (
        [*ids("hell"), IM_END], {"stop_sequences": ["lo"]}, "hell", "end_turn", None
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tokens", "body", "text", "reason", "stop"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_why_it_ended(tokens, body, text, reason, stop, stream):
    response = post({**body, "stream": stream}, script={"msg_0": tokens})
    if stream:
        events = named_events_of(response)
        got = "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta")
        end = events[-2]["delta"]
    else:
        end = response.json()
        (block,) = end["content"]
        got = block["text"]
    assert (got, end["stop_reason"], end["stop_sequence"]) == (text, reason, stop)


def test_the_sampling_is_the_requests():
    engine = make_engine()
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "max_tokens": 3}
    assert post({**body, "metadata": {"user_id": "me"}}, engine).status_code == 200
    sampling = engine.runner.admissions[0][2].sampling
    assert {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "stop", "max_tokens")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ("x",), "max_tokens": 3,
    }  # fmt: skip


CONVERSATIONS = {
    "a text": ({}, "[user: hi]"),
    "a system text": ({"system": "brief"}, "[system: brief][user: hi]"),
    "system blocks": (
        {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, *texts("b")]},
        "[system: a\nb][user: hi]",
    ),
    "text blocks": ({"messages": [{"role": "user", "content": texts("a", "b")}]}, "[user: a\nb]"),
    "a system turn": (
        {"messages": [*HELLO, {"role": "system", "content": texts("brief")}]}, "[user: hi][system: brief]"
    ),
    "tools in the history": (
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": [
                        *texts("so"),
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                        {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": texts("one", "1")},
                        {"type": "tool_result", "tool_use_id": "t2", "is_error": False},
                        {"type": "tool_result", "tool_use_id": "t3", "content": "three"},
                        *texts("and", "now"),
                    ],
                },
            ]
        },
        '[user: hi][assistant calls t1 f with {"a": 1} calls t2 g with {}: so]'
        "[tool to t1: one\n1][tool to t2: ][tool to t3: three][user: and\nnow]",
    ),
    "a call without words": (
        {
            "messages": [
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [*texts("a"), RESULT, *texts("b")]},
            ]
        },
        "[assistant calls t f with {}: ][user: a][tool to t: ][user: b]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "prompt"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation_reaches_the_template_in_its_own_words(body, prompt):
    assert prompt_of(body, chat_template=TOOLS_TEMPLATE) == prompt


@pytest.mark.parametrize("content", ["It is ", texts("It", "is ")])
def test_an_answer_goes_on_with_the_last_words_of_the_assistant(content):
    body = {"messages": [*HELLO, {"role": "assistant", "content": content}]}
    words = content if isinstance(content, str) else "It\nis "
    assert prompt_of(body) == RENDERED + words


@pytest.mark.parametrize(("body", "prompt"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_count_is_what_the_call_itself_uses(body, prompt):
    tokenizer = tokenizer_with(chat_template=TOOLS_TEMPLATE)
    settings = {"tokenizer": tokenizer, "max_model_len": 2000, "num_blocks": 600}
    counted = count(body, **settings)
    assert counted.json() == {"input_tokens": post(body, **settings).json()["usage"]["input_tokens"]}
    assert counted.json()["input_tokens"] == len(tokenizer.encode(prompt, add_special_tokens=False))


def test_the_count_of_a_turn_that_goes_on_is_what_the_call_itself_uses():
    body = {"messages": [*HELLO, {"role": "assistant", "content": "It is "}]}
    assert count(body).json()["input_tokens"] == post(body).json()["usage"]["input_tokens"]


def test_counting_takes_no_step():
    engine = make_engine()
    assert ask(engine, f"{PATH}/count_tokens", {"messages": HELLO, "model": "tiny"}).status_code == 200
    assert engine.runner.outputs == []


BAD = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "a limit of nothing": ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    "a limit that never fits": ({"max_tokens": 10**6}, "max_tokens can be at most"),
    "a temperature": ({"temperature": -1}, "temperature must be from 0 to 100, got -1"),
    "a temperature of text": ({"temperature": "1"}, "temperature"),
    "top_k": ({"top_k": 1.5}, "top_k"),
    "an empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences must hold non-empty"),
    "17 stop sequences": ({"stop_sequences": ["a"] * 17}, "stop_sequences may hold at most 16 items, got 17"),
    "a stop sequence alone": ({"stop_sequences": "a"}, "stop_sequences"),
    "metadata": ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    "no messages": ({"messages": []}, "messages must hold at least one"),
    "no messages but a system": ({"messages": [], "system": "hi"}, "messages must hold at least one"),
    "messages of text": ({"messages": "hi"}, "messages: "),
    "a message of text": ({"messages": ["hi"]}, "messages[0]: "),
    "too many messages": ({"messages": [*HELLO * 10_000, None]}, "at most 10000 items, got 10001"),
    "too many parts": (
        {"messages": [{"role": "user", "content": [*texts("") * 10_000, None]}]},
        "messages[0].content may hold at most 10000 items, got 10001",
    ),
    "a role": ({"messages": [*HELLO, {"role": "tool", "content": "hi"}]}, "messages[1].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "no parts": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "a part of text": ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0] must be an object"),
    "a text that is none": (
        {"messages": [{"role": "user", "content": [*texts("a"), {"type": "text", "text": 5}]}]},
        "messages[0].content[1].text: ",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type is 'image'",
    ),
    "an image from a tool": (
        {
            "messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]
        },
        "messages[0].content[0].content[0].type is 'image'",
    ),
    "thoughts": (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}]}]},
        "messages[0].content[0].type is 'thinking'",
    ),
    "a call by the user": (
        {"messages": [{"role": "user", "content": [CALL]}]},
        "messages[0].content[0].type is 'tool_use'",
    ),
    "a result from the assistant": (
        {"messages": [{"role": "assistant", "content": [RESULT]}, *HELLO]},
        "messages[0].content[0].type is 'tool_result'",
    ),
    "a call without arguments": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}, *HELLO]},
        "messages[0].content[0].input is required",
    ),
    "a result that is an error": (
        {"messages": [{"role": "user", "content": [{**RESULT, "is_error": True}]}]},
        "messages[0].content[0].is_error is not supported yet",
    ),
    "a call that nobody answered": (
        {"messages": [{"role": "assistant", "content": [CALL]}]},
        "messages[0].content ends with tool_use",
    ),
    "words behind a call": (
        {
            "messages": [
                {"role": "assistant", "content": [CALL, *texts("a")]},
                *HELLO,
            ]
        },
        "messages[0].content[1] is text behind",
    ),
    "nothing to go on with": (
        {"messages": [*HELLO, {"role": "assistant", "content": texts(" ")}]}, "messages[1].content is empty"
    ),
    "a system that is an image": ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
    "a system of U+0000": ({"system": "a\0"}, "system holds U+0000 at character 1"),
    "half of a pair behind a system": (
        {"system": "a", "messages": [*HELLO, {"role": "user", "content": texts("\ud800")}]},
        "messages[1].content[0].text holds half of a surrogate pair",
    ),
    "half of a pair from a tool": (
        {
            "messages": [
                {"role": "user", "content": [RESULT, *texts("\udc00")]},
                *HELLO,
            ]
        },
        "messages[0].content[1].text holds half of a surrogate pair",
    ),
    "a prompt that is too long": (
        {"messages": [{"role": "user", "content": "x" * 200}]}, "messages: the prompt has"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "named"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_a_400_that_names_its_place(body, named, stream):
    assert named in refused({**body, "stream": stream})


def test_the_limit_is_required():
    body = json.dumps({"messages": HELLO})
    error = ask(make_engine(), PATH, body).json()["error"]
    assert error == {"type": "invalid_request_error", "message": "max_tokens is required"}


UNSUPPORTED = {
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "mcp_servers": [{}], "container": "c",
    "context_management": {}, "output_config": {"effort": "low"}, "output_format": {}, "service_tier": "flex",
    # what the chat route has and this shape has not
    "seed": 5, "n": 2, "stop": ["x"], "logprobs": True, "max_completion_tokens": 5, "continue_final_message": True,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_what_would_change_the_answer_and_is_not_supported_is_refused_by_name(name, value):
    assert refused({name: value}).startswith(f"{name} is not supported yet; ")


@pytest.mark.parametrize("name", ANTHROPIC)
def test_counting_refuses_what_the_call_refuses(name):
    response = count({name: {"type": "other"}})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{name} is not supported yet; ")


def test_values_that_change_nothing_may_be_sent():
    table = {**ANTHROPIC, **ANTHROPIC_MESSAGES}
    for body in (dict.fromkeys(table), {name: neutral[0] for name, neutral in table.items() if neutral}):
        response = post({**body, "cache_control": {"type": "ephemeral"}})
        assert response.status_code == 200, response.text
        assert "X-Millpond-Warning" not in response.headers


UNKNOWN = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "colour": 1}]}], "temprature": 1}


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_unknown_fields_are_named_in_a_header_or_refused_by_a_strict_server(path):
    body = dict(UNKNOWN) if path == PATH else {**UNKNOWN, "max_tokens": None}
    response = post(body, path=path)
    assert response.status_code == 200
    named = response.headers["X-Millpond-Warning"]
    assert "temprature, " in named
    assert named.count("messages[0].content[0].colour") == 1
    assert "temprature" in refused({"temprature": 1}, app={"strict": True})


@pytest.mark.parametrize(
    ("request_", "status", "kind"),
    [
        (("POST", PATH, {"model": "claude", "max_tokens": 5, "messages": HELLO}), 404, "not_found_error"),
        (("POST", f"{PATH}/count_tokens", {"model": "claude", "messages": HELLO}), 404, "not_found_error"),
        (("POST", f"{PATH}/batches", {}), 404, "not_found_error"),
        (("GET", PATH, None), 405, "invalid_request_error"),
        (("POST", PATH, "{"), 400, "invalid_request_error"),
        (("POST", PATH, "[]"), 400, "invalid_request_error"),
        (("POST", PATH, b" " * 4096 + b"{}"), 413, "request_too_large"),
    ],
)
def test_every_error_under_the_path_has_the_shape_of_anthropic(request_, status, kind):
    method, path, body = request_
    response = ask(make_engine(), path, body, method=method, max_body_bytes=4000)
    assert response.status_code == status
    answer = response.json()
    assert (answer["type"], answer["error"]["type"], list(answer["error"])) == ("error", kind, ["type", "message"])


def test_paths_that_only_begin_alike_keep_the_shape_of_openai():
    assert "param" in ask(make_engine(), "/v1/messages2").json()["error"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"), (403, "permission_error"), (408, "invalid_request_error"),
        (429, "rate_limit_error"), (500, "api_error"), (503, "api_error"), (504, "timeout_error"),
    ],
)  # fmt: skip
def test_each_status_has_its_type(status, kind):
    assert anthropic_body(status, error_body("no", "x", "top_k")) == {
        "type": "error",
        "error": {"type": kind, "message": "top_k: no"},
    }


def test_an_engine_that_fails_is_an_error_of_the_server(caplog):
    response = post(raises={1: RuntimeError("boom")})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "api_error"
    assert "boom" not in response.text


@pytest.mark.parametrize("step", [0, 2])
def test_a_failure_in_a_stream_is_one_error_event_and_the_end(step, caplog):
    *events, last = named_events_of(post({"stream": True}, raises={step: RuntimeError("boom")}))
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "the forward pass of this step failed"},
    }
    deltas = ["content_block_delta"] * step
    assert [each["type"] for each in events] == ["message_start", "content_block_start", *deltas]


def test_an_engine_that_has_died_is_a_503_before_any_stream(caplog):
    async def test():
        async with started(make_engine()) as (async_engine, client):
            await async_engine.shutdown()
            body = {"max_tokens": 5, "messages": HELLO, "stream": True}
            return await client.post(PATH, json=body)

    response = run(test())
    assert (response.status_code, response.json()["error"]["type"]) == (503, "api_error")
