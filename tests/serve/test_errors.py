from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from starlette.exceptions import HTTPException

from millpond.config import LoadLimits
from millpond.errors import EngineDeadError, EngineError, InvalidRequestError, ModelNotFoundError, shown
from millpond.serve.app import OTHER_ITEMS
from millpond.serve.body_limit import BodyLimit
from millpond.serve.errors import describe, error_body
from tiny_engine import GatedRunner, make_engine, run
from tiny_server import ask, started

PATH = "/v1/completions"


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    "body",
    ["{", "", "nonsense", '{"prompt": "hi"', b"\xff\xfe", "[" * 5000, '{"max_tokens": ' + "9" * 5000 + "}"],
)
def test_a_body_that_is_not_json_is_a_400(body):
    assert error_of(ask(make_engine(), PATH, body), 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', "[" * 5000, '{"max_tokens": ' + "9" * 5000 + "}"])
def test_a_body_that_breaks_the_parser_is_told_that_it_is_no_json_and_why(body):
    message = error_of(ask(make_engine(), PATH, body), 400)["message"]
    assert re.search("not valid JSON: .*(utf-8|recursion|digits)", message)


@pytest.mark.parametrize("body", ["[]", "5", "null", '"hi"'])
def test_a_body_that_is_not_an_object_is_a_400(body):
    error_of(ask(make_engine(), PATH, body), 400)


def test_a_body_of_another_content_type_is_told_what_to_send():
    async def test():
        async with started(make_engine()) as (_, client):
            return await client.post(PATH, content=b'{"prompt": "hi"}', headers={"Content-Type": "text/plain"})

    assert "application/json" in error_of(run(test()), 400)["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"prompt": "\\ud800"}', 400),
        ('{"prompt": "hi", "\\ud800": 1}', 400),
        ('{"prompt": "hi", "model": "\\ud800"}', 400),
        ('{"prompt": "hi", "user": "\\ud800"}', 400),
    ],
)
def test_half_a_surrogate_pair_is_refused_and_the_refusal_can_be_sent(body, status):
    error_of(ask(make_engine(), PATH, body), status)


def test_an_unknown_route_is_a_404():
    assert error_of(ask(make_engine(), "/v1/nonsense"), 404)["code"] == "not_found"


def test_a_wrong_method_is_a_405_that_names_the_right_one():
    response = ask(make_engine(), PATH)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("name", ["other", "", "../../etc/passwd", "/etc/passwd", "a\0b", "x" * 10_000])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_a_404_with_a_short_message(name, stream):
    response = ask(make_engine(), PATH, {"model": name, "prompt": "hi", "stream": stream})
    error = error_of(response, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert len(error["message"]) < 300
    assert "tiny" in error["message"]


@pytest.mark.parametrize(("model", "shown"), [(None, "tiny"), ("tiny", "tiny"), ("alias", "alias")])
def test_any_served_name_or_none_is_the_model(model, shown):
    response = ask(make_engine(), PATH, {"model": model, "prompt": "hi", "max_tokens": 1})
    assert response.json()["model"] == shown
    assert ask(make_engine(), PATH, {"prompt": "hi", "max_tokens": 1}).json()["model"] == "tiny"


def test_an_unexpected_exception_is_a_500_that_keeps_its_text_to_the_log(monkeypatch, caplog):
    engine = make_engine()

    def broken(self, text, **settings):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(type(engine.tokenizer), "encode", broken)
    error = error_of(ask(engine, PATH, {"prompt": "hi"}), 500)
    assert error["type"] == "server_error"
    assert "secret" not in json.dumps(error)
    assert "secret detail" in caplog.text


def test_a_body_over_the_limit_is_a_413():
    body = json.dumps({"prompt": "a" * 2000})
    error_of(ask(make_engine(), PATH, body, max_body_bytes=1000), 413)
    assert ask(make_engine(), PATH, {"prompt": "a", "max_tokens": 1}, max_body_bytes=1000).status_code == 200


def test_a_body_that_announces_more_than_the_limit_is_refused_unread():
    async def unread():
        pytest.fail("the body was read")

    async def app(scope, receive, send):
        await receive()

    async def test():
        scope = {"type": "http", "headers": [(b"content-length", b"1001")]}
        with pytest.raises(HTTPException) as caught:
            await BodyLimit(app, 1000, 10)(scope, unread, unread)
        return caught.value.status_code

    assert run(test()) == 413


LONG = "x" * 50_000


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": LONG, "content": "hi"}],
        [{"role": "user", "content": {LONG: 1}}],
        [{"role": "user", "content": [{"type": LONG}]}],
        [{"role": "user", "content": "hi", LONG: 1}],
    ],
)
def test_a_refusal_does_not_send_back_all_that_it_refuses(messages):
    response = ask(make_engine(), "/v1/chat/completions", {"messages": messages}, strict=True)
    error = error_of(response, 400)
    assert error["message"].startswith(("messages[0].", "unknown field messages[0]."))
    assert len(response.content) < 2500


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (InvalidRequestError("bad", "seed"), 400, "seed", None),
        (ModelNotFoundError("none"), 404, "model", "model_not_found"),
        (EngineDeadError("gone"), 503, None, "engine_dead"),
        (EngineError("fault"), 500, None, None),
        (RuntimeError("secret"), 500, None, None),
    ],
)
def test_each_error_has_its_status(error, status, param, code):
    got, body = describe(error)
    assert (got, body["error"]["param"], body["error"]["code"]) == (status, param, code)
    assert ("secret" in body["error"]["message"]) is False


def test_an_error_body_can_always_be_encoded():
    json.dumps(error_body("\ud800", "x", "\udfff"), ensure_ascii=False).encode()


def test_a_value_as_deep_as_the_parser_takes_is_refused_like_any_other():
    bodies = [f'{{"prompt": "hi", "stop": {"[" * depth + "]" * depth}}}' for depth in range(700, 1000, 2)]

    async def test():
        headers = {"Content-Type": "application/json"}
        async with started(make_engine()) as (_, client):
            return {(await client.post(PATH, content=body, headers=headers)).status_code for body in bodies}

    assert run(test()) == {400}


def test_what_a_message_shows_of_a_value_is_its_beginning_at_the_cost_of_that():
    class Item:
        def __repr__(self):
            calls.append(self)
            return "item"

    calls = []
    assert shown([Item()] * 1_000_000).startswith("[item, item, ")
    assert len(calls) < 100
    assert shown("x" * 1_000_000).startswith("'xxx")
    assert len(shown(["x" * 1_000_000] * 5)) <= 100


@pytest.mark.parametrize("text", ['"prompt": [%s]', '"prompt": "%s"', '"unknown": [%s]'])
def test_a_body_with_more_items_than_any_could_need_is_refused_before_it_is_parsed(text):
    load = LoadLimits(max_waiting_tokens=100)
    engine = make_engine(max_model_len=50)

    def status(num_items):
        return ask(engine, PATH, "{" + text % ("5," * num_items) + "}", load=load).status_code

    assert status(OTHER_ITEMS + 100) == 400
    assert status(OTHER_ITEMS + 101) == 413


def test_an_object_of_more_fields_than_any_has_is_refused():
    fields = {f"a{index}": 1 for index in range(1000)}
    message = error_of(ask(make_engine(), PATH, {"prompt": "hi", **fields}), 400)["message"]
    assert message == "an object may have at most 1000 fields, got 1001"


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_that_is_the_request_s_own_doing_is_the_callers_error(stream):
    class Blaming(GatedRunner):
        def execute(self, output):
            result = self.inner.execute(output)
            faults = tuple(replace(each, param="allowed_token_ids") for each in result.faults)
            return replace(result, faults=faults)

    body = {"prompt": "hi", "max_tokens": 3, "stream": stream}
    response = ask(make_engine(wrap=Blaming, faults={"cmpl-0-0": 1}), PATH, body)
    error = json.loads(response.text.split("data: ")[-1]) if stream else error_of(response, 400)
    error = error.get("error", error)
    assert (error["type"], error["param"]) == ("invalid_request_error", "allowed_token_ids")
