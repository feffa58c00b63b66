"""The description at /openapi.json: true, and enough for schemathesis to break the server by it, if it could."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import cache

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from millpond.engine.async_engine import AsyncEngine
from millpond.errors import InvalidRequestError
from millpond.serve.protocol import ChatCompletionRequest, CompletionRequest
from tiny_engine import make_engine
from tiny_server import app_over, listening, until

CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
NUM_EXAMPLES = 15
NUM_BLOCKS = 128
BODIES = {CompletionRequest: {"prompt": "hi"}, ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]}}
# What a value at a bound takes beside it.
BESIDE = {"top_logprobs": {"logprobs": True}, "max_tokens": {"echo": True}, "min_tokens": {"max_tokens": 100}}

OWN_TIMES = ("request_timeout", "deadline_unreachable", "deadline_waiting", "deadline_running")


@cache
def described():
    engine = make_engine()
    return json.dumps(app_over(engine, AsyncEngine(engine)).openapi())


def description():
    """A copy: what is narrowed below is shared between its parts, and with the next one."""
    return json.loads(described())


OPERATIONS = [(path, method) for path, each in description()["paths"].items() for method in each]
WITH_BODY = [(path, method) for path, method in OPERATIONS if "requestBody" in description()["paths"][path][method]]


@pytest.fixture(scope="module")
def engine():
    return make_engine(num_blocks=NUM_BLOCKS, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def server(engine):
    with listening(engine) as server:
        yield server


def narrowed(api):
    """A description whose every value the tiny model can serve: its own ids and names, short prompts and answers."""
    schemas = api["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest", "MessagesRequest", "ResponsesRequest"):
        fields = schemas[name]["properties"]
        for field, most in {"n": 3, "max_tokens": 8, "max_completion_tokens": 8, "min_tokens": 0}.items():
            fields.get(field, {})["maximum"] = most
        fields["timeout"] = {"type": "number", "minimum": 30}
    for name in schemas.keys() - {"Error", "ErrorBody", "AnthropicError", "AnthropicErrorBody"}:
        _narrow(schemas[name])
    tokenize = schemas["Tokenize"]
    tokenize["required"] = ["prompt"]  # or messages, which chat has
    tokenize["properties"] = {name: tokenize["properties"][name] for name in ("prompt", "return_token_strs")}
    tokenize["properties"]["prompt"] = {"type": "string", "maxLength": 20}
    for name in ("MessagesRequest", "CountTokensRequest"):  # each role has its own kinds of blocks
        schemas[name]["properties"]["messages"]["minItems"] = 1
    schemas["MessagesRequest"]["properties"]["max_tokens"] |= {"minimum": 1, "maximum": 8}
    schemas["Message"]["properties"] = {
        "role": {"const": "user"},
        "content": {"type": "string", "pattern": "^[a-z]{1,5}$"},
    }
    content = schemas["ChatMessage"]["properties"]["content"]
    content["anyOf"] = [shape for shape in content["anyOf"] if shape["type"] != "null"]
    return api


def _narrow(schema):
    if schema.get("type") == "integer" and schema.get("minimum") == 0:
        schema["maximum"] = 266
    if schema.get("type") == "string" and "enum" not in schema:
        schema |= {"maxLength": 5, "pattern": "^[a-z ]*$"}
    if schema.get("type") == "array":
        schema["maxItems"] = 2
    for name, each in schema.get("properties", {}).items():
        if name == "model":
            each |= {"anyOf": [{"enum": ["tiny"]}]}
        _narrow(each)
    for each in [schema["items"]] if "items" in schema else schema.get("anyOf", []):
        _narrow(each)


def statuses_of(api, server, path, method, mode, num_examples=NUM_EXAMPLES):
    """How often schemathesis got which status from a route, every answer being as the description says."""
    operation = schemathesis.openapi.from_dict(api)[path][method.upper()]
    statuses = Counter()

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def try_one(case):
        response = case.call(base_url=server.url)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        # Of what is wrong with a server only the end of a time that the example brings itself.
        assert response.status_code < 500 or response.json()["error"]["code"] in OWN_TIMES, response.text

    try_one()
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_the_description_allows_never_breaks_a_route(server, engine, path, method):
    statuses = statuses_of(description(), server, path, method, GenerationMode.POSITIVE)
    assert statuses.keys() <= {200, 400, 404, 429, 503, 504}
    asyncio.run(until(lambda: engine.scheduler.pool.num_free == NUM_BLOCKS))  # what ran out of time goes a step later


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), WITH_BODY)
def test_what_the_description_forbids_is_refused(server, path, method):
    statuses = statuses_of(description(), server, path, method, GenerationMode.NEGATIVE)
    assert 400 in statuses
    assert statuses.keys() <= {400, 404}  # one that names another model as well may hear of that first


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), [each for each in WITH_BODY if each[0] != "/v1/embeddings"])
def test_what_the_description_allows_is_served_where_it_is_narrowed_to_what_the_model_can(server, path, method):
    statuses = statuses_of(narrowed(description()), server, path, method, GenerationMode.POSITIVE)
    assert statuses[200] >= NUM_EXAMPLES / 10


def bounds_of(model):
    """Each bounded number of a body: its field, the values at its bounds, and those beyond them."""
    for name, field in model.model_json_schema()["properties"].items():
        low, high, above = (field.get(word) for word in ("minimum", "maximum", "exclusiveMinimum"))
        inside = [value for value in (low, high) if value is not None]
        beyond = [bound + step for bound, step in ((low, -1), (high, 1), (above, 0)) if bound is not None]
        if beyond and name not in ("timeout", "deadline_ms", "priority"):  # which the engine checks
            yield name, inside, beyond


@pytest.mark.parametrize(("model", "base"), BODIES.items())
def test_numbers_are_taken_at_the_bounds_that_the_description_shows_and_not_beyond(model, base):
    tried = 0
    for name, inside, beyond in bounds_of(model):
        beside = {field: value for field, value in BESIDE.get(name, {}).items() if field in model.model_fields}
        for value in inside:
            model.model_validate({**base, **beside, name: value}).sampling()
        for value in beyond:
            tried += 1
            with pytest.raises(InvalidRequestError):
                model.model_validate({**base, **beside, name: value}).sampling()
    assert tried >= 15


def test_every_route_is_described_with_what_it_takes_and_the_shape_of_its_errors(server):
    api = httpx.get(f"{server.url}/openapi.json").json()
    assert api == description() | {"info": api["info"]}
    for path, method in OPERATIONS:
        responses = api["paths"][path][method]["responses"]
        assert "422" not in responses
        if path not in ("/health", "/ready"):
            error = responses["default"]["content"]["application/json"]["schema"]
            shape = "AnthropicErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
            assert error == {"$ref": f"#/components/schemas/{shape}"}
