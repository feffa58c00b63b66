from __future__ import annotations

import json
from dataclasses import fields

import pytest

from millpond.core.request import SamplingParams
from millpond.errors import InvalidRequestError
from millpond.serve.protocol import ChatCompletionRequest, CompletionRequest
from millpond.serve.refusals import CHAT, COMPLETION
from tiny_engine import make_engine
from tiny_server import ask

HELLO = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return CompletionRequest.model_validate({"prompt": "hi", **fields})


def chat(**fields):
    return ChatCompletionRequest.model_validate({"messages": HELLO, **fields})


def post(path, **body):
    base = {"prompt": "hi"} if path == "/v1/completions" else {"messages": HELLO}
    return ask(make_engine(), path, json.dumps({**base, **body}))


EVERY_FIELD = {
    "n": 2,
    "max_tokens": 3,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "logit_bias": {"12": -100, "5": 1.5},
    "allowed_token_ids": [5, 12],
    "bad_words": ["y"],
    "seed": 4,
    "stop": ["x"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 3,
    "cache_salt": "tenant",
}


def test_every_sampling_field_reaches_the_engine():
    assert EVERY_FIELD.keys() | {"logprobs", "embedding"} == {field.name for field in fields(SamplingParams)}
    expected = SamplingParams(**{**EVERY_FIELD, "logit_bias": {12: -100, 5: 1.5}})
    assert completion(**EVERY_FIELD).sampling() == expected
    assert chat(**EVERY_FIELD).sampling() == expected


def test_null_and_absent_are_the_defaults_of_the_api():
    for given in ({}, dict.fromkeys(EVERY_FIELD)):
        assert completion(**given).sampling() == SamplingParams(max_tokens=16, temperature=1.0)
        assert chat(**given).sampling() == SamplingParams(max_tokens=None, temperature=1.0)


BAD_VALUES = [
    ("temperature", "0.5"), ("temperature", -0.1), ("temperature", True), ("top_p", 0), ("top_p", 1.1), ("top_k", 1.5),
    ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("seed", "x"), ("seed", 2**64),
    ("stop_token_ids", [1.5]), ("stop_token_ids", ["abc"]), ("stop_token_ids", [-1]), ("stop_token_ids", 5),
    ("stop_token_ids", [267]), ("min_tokens", -1),
    ("n", 0), ("n", 129), ("n", 1.5), ("n", True),
    ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("min_tokens", 17), ("min_tokens", "1"), ("bad_words", [""]),
    ("bad_words", "x"), ("bad_words", [5]), ("bad_words", ["\ud800"]), ("bad_words", ["a"] * 129), ("stop", "\ud800"),
    ("allowed_token_ids", []), ("allowed_token_ids", [267]), ("allowed_token_ids", [-1]), ("allowed_token_ids", ["a"]),
    ("allowed_token_ids", 5), ("logit_bias", {"-1": 1}), ("logit_bias", {"267": 1}), ("logit_bias", {str(2**31): 1}),
    ("logit_bias", {"abc": 1}), ("logit_bias", {"1.5": 1}), ("logit_bias", {"": 1}), ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"\u0665": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": -100.5}),
    ("logit_bias", {"5": None}), ("logit_bias", {"5": "1"}), ("logit_bias", [[5, 1]]),
    ("ignore_eos", "yes"), ("stream", 1), ("stream_options", 5), ("user", 5), ("model", 5),
    ("cache_salt", ""), ("cache_salt", 1), ("cache_salt", "x" * 1001),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_value_out_of_range_or_of_the_wrong_type_is_refused_by_name(path, name, value):
    response = post(path, **{"max_tokens": 16, name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0] == name
    assert name in error["message"]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "seed", "prompt", "user", "metadata"])
def test_numbers_that_json_does_not_have_are_refused(name, text):
    body = f'{{"prompt": "hi", "{name}": {text}}}'
    assert ask(make_engine(), "/v1/completions", body).status_code == 400


@pytest.mark.parametrize(
    ("stop", "kept"), [(None, ()), ([], ()), ("a", ("a",)), (["a", "b"], ("a", "b")), (["a"] * 16, ("a",) * 16)]
)
def test_stop_is_a_string_or_up_to_sixteen(stop, kept):
    assert completion(stop=stop).sampling().stop == kept


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 5, [5], ["a", None], ["a"] * 17, "a" * 1001, {"a": 1}])
def test_a_stop_that_is_empty_not_text_or_too_much_is_refused(stop):
    with pytest.raises(InvalidRequestError) as caught:
        completion(stop=stop).sampling()
    assert caught.value.param == "stop"


def test_stop_token_ids_are_at_most_a_thousand():
    assert len(completion(stop_token_ids=[5] * 1000).sampling().stop_token_ids) == 1000
    response = post("/v1/completions", stop_token_ids=[5] * 1001)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop_token_ids"
    assert "1000" in response.json()["error"]["message"]


UNSUPPORTED = {
    "response_format": {"type": "json_object"}, "use_beam_search": True, "best_of": 2,
    "truncate_prompt_tokens": 5, "guided_json": {},
    "structured_outputs": {}, 
}  # fmt: skip
UNSUPPORTED_COMPLETION = {**UNSUPPORTED, "suffix": "x", "max_completion_tokens": 5}
UNSUPPORTED_CHAT = {
    **UNSUPPORTED, "echo": True, "tools": [{"type": "function"}], "tool_choice": "auto",
    "functions": [{}], "function_call": "auto", "parallel_tool_calls": False, "audio": {}, "modalities": ["audio"],
    "prediction": {}, "reasoning_effort": "low", "store": True, "metadata": {"a": "b"}, "chat_template": "x",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED_COMPLETION.items())
def test_a_completion_refuses_by_name_what_is_not_supported(name, value):
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported") as caught:
        completion(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED_CHAT.items())
def test_a_chat_refuses_by_name_what_is_not_supported(name, value):
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported") as caught:
        chat(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_a_400_streamed_or_not(path, stream):
    response = post(path, stream=stream, best_of=2)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize(("path", "table"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_values_that_change_nothing_may_be_sent(path, table):
    assert post(path, max_tokens=1, **dict.fromkeys(table)).status_code == 200
    first_neutral = {name: neutral[0] for name, neutral in table.items() if neutral}
    assert post(path, max_tokens=1, **first_neutral).status_code == 200


def test_a_remedy_is_spelled_in_json():
    for name, value, remedy in (("use_beam_search", True, "false"), ("suffix", "x", '""'), ("best_of", 2, "1")):
        with pytest.raises(InvalidRequestError, match=f"set it to {remedy}$"):
            completion(**{name: value})
    with pytest.raises(InvalidRequestError, match=r'"auto" or "default"$'):
        chat(service_tier="flex")


def test_a_token_id_that_is_written_in_two_ways_is_refused():
    error = post("/v1/completions", logit_bias={"5": 1, "05": -1}).json()["error"]
    assert (error["param"], "2 keys for 1 token ids" in error["message"]) == ("logit_bias", True)


def test_more_biases_than_a_vocabulary_has_tokens_are_refused_unread():
    error = post("/v1/completions", logit_bias={str(index): 1 for index in range(50_001)}).json()["error"]
    assert error["message"] == "logit_bias may hold at most 50000 items, got 50001"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1, got 0"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens is 1000000"),
        ({"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens (3) is more than max_completion_tokens (2)"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be from 0 to 20, got 21"),
    ],
)
def test_a_message_names_the_field_as_the_caller_wrote_it(fields, named):
    assert named in post("/v1/chat/completions", **fields).json()["error"]["message"]


def test_true_is_not_one():
    assert post("/v1/completions", best_of=True).status_code == 400
    assert post("/v1/completions", use_beam_search=0).status_code == 400


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "xml", None])
def test_a_response_format_is_never_silently_ignored(kind):
    response = post("/v1/chat/completions", response_format={"type": kind})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


UNKNOWN = {
    "temprature": ({"temprature": 0.5}, "temprature"),
    "an option of the stream": (
        {"stream": True, "stream_options": {"usage": True}, "max_tokens": 1}, "stream_options.usage"
    ),
    "a line's end": ({"a\r\nSet-Cookie: \u00e9": 1}, "a\\r\\nSet-Cookie: \\u00e9"),
    "a long name": ({"x" * 500: 1}, "x" * 100),
    "many": ({f"x{i}": i for i in range(12)}, "x0, x1, x2, x3, x4, x5, x6, x7, x8, x9 and 2 more"),
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("fields", "named"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_field_changes_nothing_and_is_named_in_a_header(path, fields, named):
    response = post(path, **{"max_tokens": 4, **fields})
    assert response.status_code == 200
    assert response.headers["X-Millpond-Warning"] == f"unknown fields were ignored: {named}"
    if not fields.get("stream"):
        assert response.json() == post(path, max_tokens=4).json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("fields", "named"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_strict_server_refuses_the_first_unknown_field_by_its_path(path, fields, named):
    base = {"prompt": "hi"} if path == "/v1/completions" else {"messages": HELLO}
    response = ask(make_engine(), path, {**base, **fields}, strict=True)
    assert response.status_code == 400
    assert "--strict" in response.json()["error"]["message"]
    assert json.dumps(response.json()["error"]["param"])[1:-1] == named.split(",")[0]


def test_an_unknown_field_of_a_message_is_named_by_its_place_and_kept_from_the_template():
    messages = [*HELLO, {"role": "user", "content": "hi", "colour": "red"}]
    response = post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert response.headers["X-Millpond-Warning"].endswith(": messages[1].colour")
    assert chat(messages=messages).messages[1].as_template_sees_it() == {"role": "user", "content": "hi"}


def test_what_is_known_has_no_warning():
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "X-Millpond-Warning" not in post(path, max_tokens=1, seed=5, user="me").headers


@pytest.mark.parametrize("prompt", ["a\0", "a\ud800b", ["a", "\0"], ["a", "\udfff"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_no_text_is_refused_before_a_stream_begins(prompt, stream):
    response = post("/v1/completions", prompt=prompt, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ("prompt" if isinstance(prompt, str) else "prompt[1]")


def test_a_stream_option_of_the_wrong_type_is_refused():
    assert post("/v1/completions", stream=True, stream_options={"include_usage": "yes"}).status_code == 400


def test_fields_that_say_who_asks_change_nothing():
    hints = {"user": "me", "safety_identifier": "me", "prompt_cache_key": "k"}
    bodies = [post("/v1/completions", max_tokens=4, **extra).json() for extra in ({}, hints)]
    assert bodies[0] == bodies[1]
