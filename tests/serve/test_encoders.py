"""A server of a model that makes embeddings alone, over an engine whose vectors are known."""

from __future__ import annotations

import json
import struct

import pytest

from helpers import scripted_embedding
from millpond.errors import InvalidRequestError
from millpond.llm import LLM
from millpond.serve.intake import ENCODERS_TOKEN
from tiny_engine import ids, make_engine
from tiny_server import ask

LONGEST = 48
SAID = "this model makes embeddings and generates no text: send the text to /v1/embeddings"


def engine_of(**settings):
    sizes = {"max_model_len": LONGEST, "max_num_batched_tokens": 64}
    return make_engine(**{**sizes, "embedding_size": 4, "whole_prompts": True, "prefix_cache": False, **settings})


def post(path, body, **settings):
    return ask(engine_of(**settings), path, json.dumps(body))


def test_inputs_become_vectors_and_each_is_whole_in_a_step():
    engine = engine_of()
    inputs = [ids("a" * length) for length in (40, 30, 20, LONGEST)]
    answer = ask(engine, "/v1/embeddings", json.dumps({"input": inputs})).json()
    assert [each["embedding"] for each in answer["data"]] == [
        list(struct.unpack("<4f", scripted_embedding(each))) for each in inputs
    ]
    lengths = [[len(each.token_ids) for each in output.scheduled] for output in engine.runner.outputs]
    assert lengths == [[40], [30, 20], [LONGEST]]
    assert answer["usage"]["prompt_tokens"] == 138


def test_an_input_that_is_too_long_is_refused_by_its_name():
    error = post("/v1/embeddings", {"input": [ids("a"), ids("a" * (LONGEST + 1))]})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "input[1]"
    assert (
        error.json()["error"]["message"] == f"input[1] has {LONGEST + 1} tokens, and at most {LONGEST} fit; shorten it"
    )


def test_a_text_of_more_characters_than_the_longest_tokens_have_may_fit():
    """A tokenizer of words drops what is between them; this one does not, so that only the refusal differs."""
    most = ENCODERS_TOKEN * LONGEST
    answers = [post("/v1/embeddings", {"input": "a" * size}).json() for size in (most, most + 1)]
    fits, longer = (answer["error"]["message"] for answer in answers)
    assert fits == f"input has {most} tokens, and at most {LONGEST} fit; shorten it"
    assert longer == f"input has {most + 1} characters, and at most {most} are read for this context; shorten it"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_every_route_that_generates_says_where_to_send_it(path, body, stream):
    answer = post(path, {"model": "tiny", **body, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(SAID)
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_model_of_another_name_is_still_not_found():
    assert post("/v1/completions", {"prompt": "hi", "model": "other"}).status_code == 404


def test_it_says_how_long_a_text_may_be():
    cards = ask(engine_of(), "/v1/models").json()["data"]
    assert {card["max_model_len"] for card in cards} == {LONGEST}
    counted = post("/tokenize", {"prompt": "hi"}).json()
    assert counted["max_model_len"] == LONGEST


def test_in_python_generating_is_refused_and_embedding_is_not():
    llm = LLM.from_engine(engine_of())
    for ask_for in (lambda: llm.generate("hi"), lambda: llm.chat([{"role": "user", "content": "hi"}])):
        with pytest.raises(InvalidRequestError, match=SAID) as error:
            ask_for()
        assert error.value.param == "model"
    assert len(llm.embed(["hi", "you"], dimensions=2)) == 2
    with pytest.raises(InvalidRequestError, match=f"has {LONGEST + 1} tokens, more than max_model_len {LONGEST}"):
        llm.embed([ids("a" * (LONGEST + 1))])
