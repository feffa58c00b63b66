from __future__ import annotations

from pathlib import Path

import pytest

from millpond import __version__
from tiny_engine import make_engine, run
from tiny_server import NOW, ask, started


def test_the_root_says_what_this_is_and_where_the_docs_are():
    body = ask(make_engine(), "/").json()
    assert body["millpond"] == __version__
    assert body["models"] == ["tiny", "alias"]
    for path in [*body["try"][:1], *body["try"][-2:], body["docs"]]:
        assert ask(make_engine(), path).status_code == 200


def test_the_version_is_the_packages():
    assert ask(make_engine(), "/version").json() == {"version": __version__}


def test_the_models_are_the_served_names():
    body = ask(make_engine(), "/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "alias"]
    assert body["data"][0] == {
        "id": "tiny",
        "object": "model",
        "created": NOW,
        "owned_by": "millpond",
        "max_model_len": 128,
    }


def test_a_model_can_be_looked_up_by_name_even_with_a_slash():
    assert ask(make_engine(), "/v1/models/tiny").json()["id"] == "tiny"
    assert ask(make_engine(), "/v1/models/org/name", model_names=("org/name",)).json()["id"] == "org/name"
    assert ask(make_engine(), "/v1/models/other").status_code == 404


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc/passwd", "/etc/passwd", "a%00b", "x" * 10_000]
)
def test_a_name_that_looks_like_a_path_is_a_model_that_is_not_there(name):
    response = ask(make_engine(), f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] in ("model_not_found", "not_found")
    assert len(response.content) < 1000
    assert str(Path.home()) not in response.text


def test_health_counts_the_steps():
    async def test():
        async with started(make_engine()) as (async_engine, client):
            assert (await client.get("/health")).json() == {"status": "ok", "steps": 0, "running": 0, "waiting": 0}
            await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "ignore_eos": True})
            assert (await client.get("/health")).json()["steps"] >= 3
            await async_engine.shutdown()
            assert (await client.get("/health")).status_code == 503

    run(test())


def test_the_interface_description_names_every_route():
    paths = ask(make_engine(), "/openapi.json").json()["paths"]
    assert {"/v1/messages", "/v1/messages/count_tokens", "/v1/responses"} <= paths.keys()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/version"} <= paths.keys()
