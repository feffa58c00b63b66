from __future__ import annotations

import json

import openai
import pytest

from millpond.serve.refusals import RESPONSES
from tiny_engine import IM_END, ids, make_engine, run, tiny_tokenizer, tokenizer_with
from tiny_server import NOW, ask, listening, named_events_of

PATH = "/v1/responses"
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NUM_PROMPT_TOKENS = len(tiny_tokenizer().encode(RENDERED))
TEMPLATE = "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}"
AWKWARD = 'a"b\\c\né👩\u2028'


def post(body=None, engine=None, app=None, **settings):
    whole = {"model": "tiny", "input": "hi", **(body or {})}
    return ask(engine or make_engine(**settings), PATH, json.dumps(whole), **(app or {}))


def prompt_of(body, **template):
    """The text that the model is given."""
    engine = make_engine(tokenizer=tokenizer_with(**template), max_model_len=2000, num_blocks=600)
    response = post({"max_output_tokens": 1, **body}, engine)
    assert response.status_code == 200, response.text
    return tiny_tokenizer().decode(engine.runner.admissions[0][2].prompt_token_ids, skip_special_tokens=False)


def refused(body, **settings):
    response = post(body, **settings)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def usage(num_output_tokens):
    return {
        "input_tokens": NUM_PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": NUM_PROMPT_TOKENS + num_output_tokens,
    }


def part(text):
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item(status, *parts):
    return {"id": "msg_0", "type": "message", "role": "assistant", "status": status, "content": list(parts)}


def response_with(**fields):
    return {
        "id": "resp_0",
        "object": "response",
        "created_at": NOW,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": "tiny",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **fields,
    }


def test_a_response_has_the_shape_of_openai():
    answer = post(script={"resp_0": [*ids("abc"), IM_END]}).json()
    output = [item("completed", part("abc"))]
    assert answer == response_with(status="completed", output=output, usage=usage(4), completed_at=NOW)


def test_a_response_says_what_it_was_asked():
    body = {"instructions": "b", "metadata": {"a": "1"}, "user": "me", "max_output_tokens": 5}
    asked = {**body, "temperature": 0.5, "top_p": 0.9}
    answer = post(asked).json()
    assert {name: answer[name] for name in asked} == asked


def test_a_stream_has_the_events_of_openai_in_their_order():
    events = named_events_of(post({"stream": True}, script={"resp_0": [*ids("añ"), IM_END]}))
    place = {"item_id": "msg_0", "output_index": 0, "content_index": 0}
    begun = response_with(status="in_progress", output=[])
    output = [item("completed", part("añ"))]
    ended = response_with(status="completed", output=output, usage=usage(4), completed_at=NOW)
    expected = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item("in_progress")},
        {"type": "response.content_part.added", **place, "part": part("")},
        {"type": "response.output_text.delta", **place, "delta": "a", "logprobs": []},
        {"type": "response.output_text.delta", **place, "delta": "ñ", "logprobs": []},
        {"type": "response.output_text.done", **place, "text": "añ", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part("añ")},
        {"type": "response.output_item.done", "output_index": 0, "item": output[0]},
        {"type": "response.completed", "response": ended},
    ]
    assert events == [{**each, "sequence_number": number} for number, each in enumerate(expected)]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_limit_ends_is_incomplete(stream):
    response = post({"max_output_tokens": 3, "stream": stream}, script={"resp_0": ids("hello")})
    if stream:
        *events, last = named_events_of(response)
        assert last["type"] == "response.incomplete"
        assert events[-1]["item"]["status"] == "incomplete"
        answer = last["response"]
    else:
        answer = response.json()
    assert answer == response_with(
        status="incomplete",
        incomplete_details={"reason": "max_output_tokens"},
        max_output_tokens=3,
        output=[item("incomplete", part("hel"))],
        usage=usage(3),
    )


@pytest.mark.parametrize("text", ["", AWKWARD])
def test_the_deltas_of_a_stream_join_to_the_text(text):
    script = {"resp_0": [*ids(text), IM_END]}
    events = named_events_of(post({"stream": True}, script=script))
    deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
    assert (
        "".join(deltas) == text == events[-4]["text"] == post(script=script).json()["output"][0]["content"][0]["text"]
    )
    assert "" not in deltas


def test_the_sampling_is_the_requests():
    engine = make_engine()
    assert post({"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 3}, engine).status_code == 200
    sampling = engine.runner.admissions[0][2].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 3)


def parts(kind, *texts):
    return [{"type": kind, "text": text} for text in texts]


CONVERSATIONS = {
    "a text": ({}, "[user: hi]"),
    "instructions": ({"instructions": "brief"}, "[system: brief][user: hi]"),
    "messages": (
        {
            "input": [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": parts("input_text", "b", "c"), "type": "message"},
                {"role": "assistant", "content": "d"},
                {"role": "user", "content": "e", "type": None},
            ],
        },
        "[system: a][user: b\nc][assistant: d][user: e]",
    ),
    "an answer as it came": (
        {"instructions": "s", "input": [{"role": "user", "content": "hi"}, item("completed", part("yo")),
                                        {"role": "user", "content": "so"}]},
        "[system: s][user: hi][assistant: yo][user: so]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "prompt"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_input_reaches_the_template_in_its_own_words(body, prompt):
    assert prompt_of(body, chat_template=TEMPLATE) == prompt
    few = {**body, "max_output_tokens": 3}
    assert "X-Millpond-Warning" not in post(few, max_model_len=2000, num_blocks=600).headers


def test_the_models_own_template_is_used():
    assert prompt_of({}) == RENDERED


BAD = {
    "no input": ({"input": None}, "input"),
    "an empty input": ({"input": []}, "input"),
    "an input of a number": ({"input": 5}, "input"),
    "too many items": ({"input": [*[{"role": "user", "content": ""}] * 10_000, None]}, "input"),
    "an item of text": ({"input": ["hi"]}, "input[0]"),
    "a call": ({"input": [{"role": "user", "content": "a"}, {"type": "function_call"}]}, "input[1].type"),
    "a reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "a role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "no parts": ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    "a part of text": ({"input": [{"role": "user", "content": ["hi"]}]}, "input[0].content[0]"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    "the user's output": (
        {"input": [{"role": "user", "content": parts("output_text", "a")}]}, "input[0].content[0].type"
    ),
    "a text of a number": (
        {"input": [{"role": "user", "content": parts("input_text", 5)}]}, "input[0].content[0].text"
    ),
    "annotations": (
        {"input": [{"role": "assistant", "content": [{**part("a"), "annotations": [{}]}]}]},
        "input[0].content[0].annotations",
    ),
    "a U+0000": ({"input": "a\0"}, "input"),
    "a U+0000 in instructions": ({"instructions": "a\0"}, "instructions"),
    "half of a pair behind instructions": (
        {"instructions": "a", "input": [{"role": "user", "content": "\ud800"}]}, "input[0].content"
    ),
    "too long": ({"input": "x" * 200}, "input"),
    "far too long": ({"input": "x" * 10**6}, "input"),
    "a limit of nothing": ({"max_output_tokens": 0}, "max_output_tokens"),
    "a limit that never fits": ({"max_output_tokens": 10**6}, "max_output_tokens"),
    "a limit of text": ({"max_output_tokens": "5"}, "max_output_tokens"),
    "a temperature": ({"temperature": -1}, "temperature"),
    "a format": ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    "metadata of numbers": ({"metadata": {"a": 1}}, "metadata.a"),
    "much metadata": ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    "long metadata": ({"metadata": {"a": "x" * 513}}, "metadata"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_a_400_that_names_its_place(body, param, stream):
    error = refused({**body, "stream": stream})
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_a_message_names_the_fields_as_the_caller_did():
    assert "max_output_tokens must be at least 1, got 0" in refused({"max_output_tokens": 0})["message"]
    long = refused({"max_output_tokens": 10**6})["message"]
    assert "max_output_tokens is 1000000" in long
    assert " max_tokens" not in long
    assert refused({"input": "x" * 10**6})["message"].startswith("input has 1000000 characters")
    assert refused({"instructions": "a", "input": "\0"})["message"].startswith("input holds U+0000")


UNSUPPORTED = {
    "previous_response_id": "resp_1", "conversation": "c", "store": True, "background": True, "tools": [{}],
    "tool_choice": "required", "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"},
    "truncation": "auto", "top_logprobs": 3, "prompt": {"id": "p"}, "service_tier": "flex",
    # what the chat route has and this shape has not
    "seed": 5, "n": 2, "stop": ["x"], "top_k": 5, "messages": [], "max_tokens": 5, "response_format": {},
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_what_would_change_the_answer_and_is_not_supported_is_refused_by_name(name, value):
    error = refused({name: value})
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported yet; ")


def test_values_that_change_nothing_may_be_sent():
    neutral = {name: values[0] for name, values in RESPONSES.items() if values}
    hints = {"user": "me", "safety_identifier": "me", "prompt_cache_key": "k"}
    text = {"text": {"format": {"type": "text"}, "verbosity": None}}
    for body in (dict.fromkeys(RESPONSES), {**neutral, **hints, **text}):
        response = post(body)
        assert response.status_code == 200, response.text
        assert "X-Millpond-Warning" not in response.headers


def test_unknown_fields_are_named_in_a_header_or_refused_by_a_strict_server():
    body = {
        "temprature": 1,
        "text": {"shape": 1},
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "colour": 1}]}],
    }
    named = post(body).headers["X-Millpond-Warning"].removeprefix("unknown fields were ignored: ").split(", ")
    assert sorted(named) == ["input[0].content[0].colour", "temprature", "text.shape"]
    assert refused(body, app={"strict": True})["param"] == "temprature"


def test_a_model_that_is_not_here_is_a_404():
    response = post({"model": "gpt"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_an_engine_that_fails_is_an_error_of_the_server(caplog):
    response = post(raises={1: RuntimeError("boom")})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize("step", [0, 2])
def test_a_failure_in_a_stream_is_one_event_with_what_there_was(step, caplog):
    script = {"resp_0": ids("hello")}
    *events, last = named_events_of(post({"stream": True}, raises={step: RuntimeError("boom")}, script=script))
    output = [item("incomplete", part("he"))] if step else []
    error = {"code": "server_error", "message": "the forward pass of this step failed"}
    failed = response_with(status="failed", output=output, error=error)
    assert last == {"type": "response.failed", "sequence_number": len(events), "response": failed}
    assert events[-1]["type"] == ("response.output_text.delta" if step else "response.content_part.added")


class Always:
    """A script that says the same to everyone."""

    def get(self, request_id, default):
        return [*ids("añ😀!"), IM_END]


@pytest.fixture(scope="module")
def url():
    engine = make_engine()
    engine.runner.script = Always()
    with listening(engine) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_the_client_gets_a_response_and_can_send_it_back(client):
    response = client.responses.create(model="tiny", input="hi", instructions="brief", store=False)
    assert isinstance(response.output[0], openai.types.responses.ResponseOutputMessage)
    assert (response.output_text, response.status) == ("añ😀!", "completed")
    again = client.responses.create(
        model="tiny", input=[{"role": "user", "content": "hi"}, *response.output, {"role": "user", "content": "so"}]
    )
    assert again.usage.input_tokens > NUM_PROMPT_TOKENS


def test_the_stream_helper_joins_the_deltas(client):
    with client.responses.stream(model="tiny", input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert deltas == ["a", "ñ", "😀", "!"]
    assert final.output_text == "".join(deltas)
    assert final.usage.total_tokens == NUM_PROMPT_TOKENS + len(Always().get("", None))


@pytest.mark.parametrize(("limit", "last"), [(20, "response.completed"), (3, "response.incomplete")])
def test_the_asynchronous_client_streams_typed_events(url, limit, last):
    async def test():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model="tiny", input="hi", stream=True, max_output_tokens=limit)
            return [event async for event in stream]

    events = run(test())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", last)
    assert events[-1].response.output_text == ("añ😀!" if limit == 20 else "añ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_clients_own_error_with_the_parameter(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="hi", stream=stream, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), [({"user": "\ud800"}, "user"), ({"metadata": {"a": "\ud800"}}, "metadata")])
def test_what_could_not_be_sent_back_is_refused(body, param, stream):
    assert refused({**body, "stream": stream})["param"] == param
