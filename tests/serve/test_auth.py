from __future__ import annotations

import hmac

import openai
import pytest

from millpond.serve.auth import ApiKeys
from tiny_engine import make_engine, run
from tiny_server import ask, listening, started

KEYS = ("first-key", "second-key")
BODY = {"prompt": "hi", "max_tokens": 1}


def get(path, headers, method="GET", keys=KEYS, body=None):
    async def once():
        async with started(make_engine(), api_keys=keys) as (_, client):
            return await client.request(method, path, headers=headers, json=body)

    return run(once())


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_any_of_the_keys_opens_every_route_whatever_the_case_of_bearer(key, scheme):
    headers = {"Authorization": f"{scheme} {key}"}
    assert get("/v1/models", headers).status_code == 200
    assert get("/v1/completions", headers, "POST", body=BODY).status_code == 200


def test_the_header_of_anthropics_clients_opens_too():
    assert get("/v1/models", {"x-api-key": "second-key"}).status_code == 200
    assert get("/v1/models", {"x-api-key": "other"}).status_code == 401


def test_a_401_under_anthropics_path_has_the_shape_of_its_clients():
    response = get("/v1/messages", {"x-api-key": "other"}, "POST", body={})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert (response.json()["type"], response.json()["error"]["type"]) == ("error", "authentication_error")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"Authorization", b"")],
        [(b"Authorization", b"Bearer")],
        [(b"Authorization", b"Bearer ")],
        [(b"Authorization", b"Bearer first-ke")],
        [(b"Authorization", b"Bearer first-keyy")],
        [(b"Authorization", b"Bearer first-key second-key")],
        [(b"Authorization", b"Basic first-key")],
        [(b"Authorization", b"first-key")],
        [(b"Authorization", b"Bearer \xc3\xa9")],
        [(b"Authorization", b"Bearer \xe9\xff")],
        [(b"Authorization", b"Bearer first-key"), (b"Authorization", b"Bearer other")],
        [(b"Authorization", b"Bearer first-key"), (b"x-api-key", b"other")],
    ],
)
def test_anything_else_is_a_401_in_the_shape_of_errors(headers):
    response = get("/v1/completions", headers, "POST", body=BODY)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "first-ke" not in response.text


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_what_load_balancers_look_at_is_open(path):
    assert get(path, {}).status_code == 200
    assert get(path, {}, "HEAD").status_code == 200


def test_every_other_route_is_closed_with_what_does_not_exist():
    paths = ask(make_engine(), "/openapi.json").json()["paths"]
    closed = [*(set(paths) - {"/health", "/ready"}), "/docs", "/openapi.json", "/nothing", "/health/", "/ready/x", "/"]
    assert {"/metrics", "/v1/models", "/v1/completions", "/version"} < set(closed)

    async def statuses():
        async with started(make_engine(), api_keys=KEYS) as (_, client):
            return {path: (await client.get(path)).status_code for path in closed}

    assert set(run(statuses()).values()) == {401}


def test_without_keys_nobody_needs_one():
    assert get("/v1/models", {}, keys=()).status_code == 200


def test_every_key_is_compared_in_full_and_at_one_length(monkeypatch):
    compared = []

    def counting(one, other):
        compared.append((len(one), len(other)))
        return compare(one, other)

    compare = hmac.compare_digest
    monkeypatch.setattr("millpond.serve.auth.hmac.compare_digest", counting)
    keys = ApiKeys(None, ("a", "b" * 100, "c"))
    assert keys._number({"headers": [(b"authorization", b"Bearer a")]})
    assert not keys._number({"headers": [(b"authorization", b"Bearer x")]})
    assert compared == [(32, 32)] * 6


def test_no_key_comes_into_the_log(caplog):
    caplog.set_level("DEBUG")
    get("/v1/models", {"Authorization": "Bearer first-key"})
    get("/v1/models", {"Authorization": "Bearer wrong-key"})
    get("/v1/models", {"x-api-key": "second-key"})
    assert "/v1/models 200" in caplog.text
    assert "/v1/models 401" in caplog.text
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("millpond", "uvicorn"))]
    assert not any("-key" in line for line in ours)


def test_the_openai_client_sends_its_key_and_raises_its_own_error_for_a_wrong_one():
    with listening(make_engine(), api_keys=KEYS) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="second-key", max_retries=0) as client:
            assert client.completions.create(model="tiny", prompt="hi", max_tokens=1).choices
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="nonsense", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def preflight(origin, **settings):
    async def once():
        async with started(make_engine(), **settings) as (_, client):
            headers = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization",
            }
            asked = await client.options("/v1/completions", headers=headers)
            got = await client.get("/health", headers={"Origin": origin})
            return asked, got

    return run(once())


def test_no_page_of_another_origin_may_ask_by_default():
    asked, got = preflight("https://a.test")
    assert asked.status_code == 405
    assert not [name for name in [*asked.headers, *got.headers] if name.startswith("access-control")]


def test_a_page_of_a_named_origin_may_ask_and_others_may_not():
    asked, got = preflight("https://a.test", cors_origins=("https://a.test",), api_keys=KEYS)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://a.test"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert got.headers["access-control-allow-origin"] == "https://a.test"
    exposed = got.headers["access-control-expose-headers"].split(", ")
    assert exposed == ["X-Request-Id", "X-Millpond-Warning", "Retry-After"]
    asked, got = preflight("https://b.test", cors_origins=("https://a.test",))
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in got.headers


def test_a_refusal_for_want_of_a_key_can_be_read_by_the_page_that_got_it():
    async def once():
        async with started(make_engine(), api_keys=KEYS, cors_origins=("*",)) as (_, client):
            return await client.get("/v1/models", headers={"Origin": "https://a.test"})

    response = run(once())
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "*"
