from __future__ import annotations

import io
import json
import logging

import pytest

from millpond.engine.async_engine import AsyncEngine
from millpond.serve.logs import JsonFormatter, TextFormatter
from millpond.serve.request_log import MAX_LOGGED_BODY_BYTES
from tiny_engine import GatedRunner, make_engine, run
from tiny_server import HandDriven, app_over, started

BODY = {"prompt": "hi", "max_tokens": 2, "ignore_eos": True}


def send(*requests, engine=None, **settings):
    """Each (method, path, headers, body) to one server; the responses."""

    async def all_of_them():
        async with started(engine or make_engine(), **settings) as (_, client):
            return [
                await client.request(method, path, headers=headers, json=body)
                for method, path, headers, body in requests
            ]

    return run(all_of_them())


def post(headers=None, body=BODY, path="/v1/completions", **settings):
    return send(("POST", path, headers or {}, body), **settings)[0]


@pytest.fixture
def logged(caplog):
    """What is logged, by our own formatters: logged.text() and logged.entries()."""
    text, entries = logging.StreamHandler(io.StringIO()), logging.StreamHandler(io.StringIO())
    text.setFormatter(TextFormatter())
    entries.setFormatter(JsonFormatter())
    root = logging.getLogger()
    for handler in (text, entries):
        root.addHandler(handler)
    caplog.set_level("DEBUG")

    class Logged:
        def text(self):
            return [line for line in text.stream.getvalue().splitlines() if "HTTP Request: " not in line]

        def entries(self, name="millpond.access"):
            everything = [json.loads(line) for line in entries.stream.getvalue().splitlines()]
            return [entry for entry in everything if entry["logger"] == name]

    yield Logged()
    for handler in (text, entries):
        root.removeHandler(handler)


@pytest.mark.parametrize("request_id", ["abc", "0b9d6a5e-7c3f", "a.b_c:d-E9", "x" * 128])
def test_a_sane_request_id_is_taken_over(request_id):
    response = post({"X-Request-Id": request_id})
    assert response.headers["x-request-id"] == request_id
    assert response.json()["id"].startswith(f"cmpl-{request_id}-")


@pytest.mark.parametrize("request_id", ["", " ", "a b", "a/b", "x" * 129, "a\tb", "%0a", '"', "é".encode()])
def test_any_other_request_id_is_replaced_by_one_of_ours(request_id):
    response = post({"X-Request-Id": request_id})
    assert response.headers["x-request-id"] == "0"
    assert response.json()["id"] == "cmpl-0"


def test_two_request_ids_are_none():
    assert post([("X-Request-Id", "a"), ("X-Request-Id", "b")]).headers["x-request-id"] == "0"


def test_a_request_id_that_is_sent_twice_names_two_answers():
    first, second = send(*[("POST", "/v1/completions", {"X-Request-Id": "same"}, BODY)] * 2)
    assert first.json()["id"] != second.json()["id"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", {"prompt": []}, 400),
        ("POST", "/v1/completions", {**BODY, "stream": True}, 200),
    ],
)
def test_every_answer_carries_its_request_id(method, path, body, status):
    [response] = send((method, path, {"X-Request-Id": "mine"}, body))
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_an_unexpected_exception_names_the_request_in_its_answer_and_in_the_log(monkeypatch, logged):
    engine = make_engine()

    def broken(self, text, **settings):
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(engine.tokenizer), "encode", broken)
    response = post({"X-Request-Id": "mine"}, engine=engine)
    assert response.status_code == 500
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert response.json()["error"]["message"].endswith("of request mine")
    [entry] = logged.entries("millpond.serve.errors")
    assert entry["request_id"] == "mine"
    assert entry["level"] == "error"
    assert "a bug" in entry["exception"]
    assert [entry["status"] for entry in logged.entries()] == [500]


def test_a_step_that_fails_is_logged_with_the_ids_of_the_requests_in_it(logged):
    response = post({"X-Request-Id": "mine"}, engine=make_engine(raises={1: RuntimeError("boom")}))
    assert response.status_code == 500
    [entry] = logged.entries("millpond.engine.engine")
    assert "its 1 requests end with an error: cmpl-mine-0-0" in entry["message"]
    assert "boom" in entry["exception"]


def test_the_access_log_has_one_line_for_each_request_at_its_end(logged):
    requests = [
        ("POST", "/v1/completions", {"X-Request-Id": "a"}, BODY),
        ("POST", "/v1/completions", {"X-Request-Id": "b"}, {**BODY, "stream": True}),
        ("GET", "/v1/models", {"X-Request-Id": "c"}, None),
        ("GET", "/nothing", {"X-Request-Id": "d"}, None),
    ]
    send(*requests)
    entries = logged.entries()
    assert [(entry["request_id"], entry["method"], entry["path"], entry["status"]) for entry in entries] == [
        ("a", "POST", "/v1/completions", 200),
        ("b", "POST", "/v1/completions", 200),
        ("c", "GET", "/v1/models", 200),
        ("d", "GET", "/nothing", 404),
    ]
    for entry in entries:
        assert entry["level"] == "info"
        assert entry["duration_seconds"] >= 0
        assert entry["client"] == "127.0.0.1"
    assert any(line.endswith("s [a]") and "INFO: POST /v1/completions 200 in" in line for line in logged.text())


def test_what_machines_ask_for_all_the_time_is_logged_for_debugging_alone(logged):
    send(("GET", "/health", {}, None), ("GET", "/ready", {}, None), ("GET", "/metrics", {}, None))
    assert [entry["level"] for entry in logged.entries()] == ["debug"] * 3


@pytest.mark.parametrize("path", ["/a%0aINFO: forged", "/a%0d%0ab", "/%1b[31m", "/" + "x" * 5000, "/%e2%80%a8"])
def test_a_path_cannot_forge_a_line_of_the_log_nor_fill_it(path, logged):
    send(("GET", path, {}, None))
    lines = [line for line in logged.text() if "GET" in line]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert len(lines[0]) < 400


SECRET = "the-secret-of-the-prompt"


def everything(engine=None, **settings):
    """Requests of every kind whose prompts hold SECRET: good, refused, streamed, broken."""
    long = SECRET * 1000
    bodies = [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 1}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 2, "stream": True}),
        ("/v1/completions", {"prompt": long, "max_tokens": 1}),
        ("/v1/completions", {"prompt": SECRET, "temperature": SECRET}),
        ("/v1/completions", {"prompt": {SECRET: 1}}),
        ("/v1/completions", {"prompt": SECRET, "stop": SECRET, SECRET: 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
    ]
    return send(*[("POST", path, {}, body) for path, body in bodies], engine=engine, **settings)


@pytest.mark.parametrize("raises", [{}, {1: RuntimeError("boom")}])
def test_no_prompt_comes_into_the_log_at_any_level(raises, logged):
    statuses = {response.status_code for response in everything(make_engine(raises=raises))}
    assert {200, 400} <= statuses
    assert len(logged.entries()) == 8
    assert SECRET not in "\n".join(logged.text())


def test_prompts_are_logged_on_request_with_the_id_of_their_request_on_one_line_each(logged):
    post({"X-Request-Id": "mine"}, {"prompt": f"{SECRET}\nb", "max_tokens": 1}, log_prompts=True)
    [access, body] = logged.entries()
    assert access["status"] == 200
    assert body["request_id"] == "mine"
    sent = json.loads(json.loads(body["message"].removeprefix("body: ")))
    assert sent["prompt"] == f"{SECRET}\nb"


def test_a_body_is_logged_up_to_a_bound(logged):
    post(body={"prompt": "a" * 200_000}, log_prompts=True)
    assert len(logged.entries()[-1]["message"]) < MAX_LOGGED_BODY_BYTES + 100


def test_a_client_that_is_gone_before_the_status_line_is_logged_as_such(logged):
    engine = make_engine(wrap=GatedRunner)

    async def test():
        async_engine = AsyncEngine(engine)
        async_engine.start()
        client = HandDriven(app_over(engine, async_engine), "/v1/completions", BODY)
        await engine.runner.wait_until_entered()
        await client.hang_up()
        engine.runner.open_for_good()
        await async_engine.shutdown()

    run(test())
    assert [entry["status"] for entry in logged.entries()] == [499]


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_head_of_what_can_be_got_is_its_status_and_headers_without_a_body(path):
    got, head = send(("GET", path, {}, None), ("HEAD", path, {}, None))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 405), ("/nothing", 404), ("/v1/models/other", 404)])
def test_head_of_anything_else_is_what_get_is(path, status):
    assert [response.status_code for response in send(("GET", path, {}, None), ("HEAD", path, {}, None))] == [
        status
    ] * 2
