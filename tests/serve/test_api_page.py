"""docs/API.md says what is so: every route, field, bound and default, every refusal and what it may be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from millpond.core.sampling import SamplingParams
from millpond.engine.async_engine import AsyncEngine
from millpond.serve import refusals
from millpond.serve.embeddings import EmbeddingRequest
from millpond.serve.errors import MEANINGS
from millpond.serve.messages_protocol import CountTokensRequest, MessagesRequest
from millpond.serve.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from millpond.serve.responses_protocol import ResponsesRequest
from millpond.serve.tokens import Detokenize, Tokenize
from tiny_engine import make_engine
from tiny_server import app_over

PAGE = (Path(__file__).parents[2] / "docs" / "API.md").read_text(encoding="utf-8")
SHARED = set(GenerationRequest.model_fields)
IN_BOTH = refusals.COMPLETION.keys() & refusals.CHAT.keys() - {"best_of", "add_special_tokens"}

FIELDS = {
    "Completions and chat": (GenerationRequest, SHARED),
    "Completions alone": (CompletionRequest, CompletionRequest.model_fields.keys() - SHARED),
    "Chat alone": (ChatCompletionRequest, ChatCompletionRequest.model_fields.keys() - SHARED),
    "Messages": (ChatMessage, set(ChatMessage.model_fields)),
    "Anthropic's messages": (MessagesRequest, set(MessagesRequest.model_fields)),
    "Anthropic's count of tokens": (CountTokensRequest, set(CountTokensRequest.model_fields)),
    "Responses": (ResponsesRequest, set(ResponsesRequest.model_fields)),
    "Stream options": (StreamOptions, set(StreamOptions.model_fields)),
    "Tokenize": (Tokenize, set(Tokenize.model_fields)),
    "Detokenize": (Detokenize, set(Detokenize.model_fields)),
    "Embeddings": (EmbeddingRequest, set(EmbeddingRequest.model_fields)),
}
REFUSED = {
    "Refused in both": {name: refusals.CHAT[name] for name in IN_BOTH},
    "Refused in completions": {n: v for n, v in refusals.COMPLETION.items() if n not in IN_BOTH},
    "Refused in chat": {n: v for n, v in refusals.CHAT.items() if n not in IN_BOTH},
    "Refused in a message": refusals.MESSAGE,
    "Refused in stream options": refusals.STREAM_OPTIONS,
    "Refused in embeddings": refusals.EMBEDDING,
}


def table(title):
    """The rows of the table right below a heading, each a list of its cells."""
    section = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert section, f"there is no section {title!r}"
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names_of(rows):
    return [cells[0].strip("`") for cells in rows]


def app():
    engine = make_engine()
    return app_over(engine, AsyncEngine(engine))


def test_every_route_is_on_the_page_and_no_other():
    described = {(method.upper(), path) for path, each in app().openapi()["paths"].items() for method in each}
    named = set(re.findall(r"^\| (GET|POST) `([^`]+)`", PAGE, flags=re.MULTILINE))
    assert named == described


def test_every_body_of_a_route_has_a_table():
    models = {
        schema["$ref"].rsplit("/", 1)[1]
        for each in app().openapi()["paths"].values()
        for operation in each.values()
        if "requestBody" in operation
        for schema in [operation["requestBody"]["content"]["application/json"]["schema"]]
    }
    assert models <= {model.__name__ for model, _ in FIELDS.values()}


@pytest.mark.parametrize("title", FIELDS)
def test_every_field_has_one_row_and_its_bounds_and_default(title):
    model, names = FIELDS[title]
    rows, properties = table(title), model.model_json_schema()["properties"]
    assert sorted(names_of(rows)) == sorted(names)
    for name, default, low, high, _ in ([cells[0].strip("`"), *cells[1:]] for cells in rows):
        shown = properties[name]
        assert [low, high] == [str(shown.get(word, "")) for word in ("minimum", "maximum")], name
        if "exclusiveMinimum" in shown:
            assert "above 0" in next(cells[-1] for cells in rows if cells[0] == f"`{name}`")
        if default:
            assert json.loads(default) == SamplingParams.__dataclass_fields__[name].default, name


@pytest.mark.parametrize("title", REFUSED)
def test_every_refused_field_has_one_row_and_the_values_that_change_nothing(title):
    rows = {cells[0].strip("`"): re.findall(r"`([^`]+)`", cells[1]) for cells in table(title)}
    assert rows == {name: [json.dumps(value) for value in values] for name, values in REFUSED[title].items()}


def test_fields_that_have_no_default_on_the_page_have_none_that_matters():
    rows = table("Completions and chat")
    unsaid = {cells[0].strip("`") for cells in rows if not cells[1]} & SamplingParams.__dataclass_fields__.keys()
    given = {name: SamplingParams.__dataclass_fields__[name].default for name in unsaid - {"max_tokens"}}
    assert all(value in (None, ()) for value in given.values()), given


def test_the_statuses_that_the_description_names_are_on_the_page():
    assert {str(status) for status in MEANINGS} <= set(names_of(table("Errors")))
