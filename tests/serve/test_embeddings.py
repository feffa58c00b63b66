"""/v1/embeddings over an engine whose vectors are known."""

from __future__ import annotations

import base64
import json
import math
import struct

import openai
import pytest

from helpers import scripted_embedding
from tiny_engine import ids, make_engine, tiny_tokenizer, tokenizer_with
from tiny_server import ask, listening

SIZE = 4


def numbers(token_ids):
    return list(struct.unpack("<4f", scripted_embedding(token_ids)))


def encode(text):
    return tiny_tokenizer().encode(text)


def engine_of(**settings):
    return make_engine(**{"embedding_size": SIZE, **settings})


def post(body, **settings):
    return ask(engine_of(**settings), "/v1/embeddings", json.dumps(body))


@pytest.fixture(scope="module")
def client():
    with (
        listening(engine_of(max_num_seqs=8)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_text_becomes_a_vector_in_openais_shape():
    token_ids = encode("hi the")
    assert post({"model": "alias", "input": "hi the"}).json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": numbers(token_ids)}],
        "model": "alias",
        "usage": {"prompt_tokens": len(token_ids), "total_tokens": len(token_ids)},
    }


@pytest.mark.parametrize(
    ("given", "token_ids"),
    [
        (["hi", "the cat", "hi"], [encode("hi"), encode("the cat"), encode("hi")]),
        (ids("abc"), [ids("abc")]),
        ([ids("abc"), ids("b"), ids("longer than the others")], [ids("abc"), ids("b"), ids("longer than the others")]),
    ],
)
def test_lists_become_a_vector_each_in_their_order(given, token_ids):
    answer = post({"input": given}).json()
    assert [each["embedding"] for each in answer["data"]] == list(map(numbers, token_ids))
    assert [each["index"] for each in answer["data"]] == list(range(len(token_ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, token_ids))


def test_texts_get_what_the_model_begins_and_ends_a_prompt_with():
    tokenizer = tokenizer_with(
        ggml__add_bos_token=True, ggml__bos_token_id=1, ggml__add_eos_token=True, ggml__eos_token_id=2
    )
    assert post({"input": "hi"}, tokenizer=tokenizer).json()["data"][0]["embedding"] == numbers([1, *encode("hi"), 2])


def test_base64_is_the_same_numbers_as_little_endian_float32():
    (entry,) = post({"input": "hi", "encoding_format": "base64"}).json()["data"]
    assert base64.b64decode(entry["embedding"]) == scripted_embedding(encode("hi"))
    assert post({"input": "hi", "encoding_format": "float"}).json()["data"][0]["embedding"] == numbers(encode("hi"))


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
@pytest.mark.parametrize("dimensions", [1, 2, 4])
def test_the_first_dimensions_are_again_of_length_1(dimensions, encoding_format):
    body = {"input": "hi", "dimensions": dimensions, "encoding_format": encoding_format}
    (entry,) = post(body).json()["data"]
    got = entry["embedding"]
    if encoding_format == "base64":
        got = list(struct.unpack(f"<{dimensions}f", base64.b64decode(got)))
    first = numbers(encode("hi"))[:dimensions]
    assert got == pytest.approx([value / math.hypot(*first) for value in first], rel=1e-6)


def test_all_inputs_run_in_the_same_steps():
    engine = engine_of(max_num_seqs=4)
    answer = ask(engine, "/v1/embeddings", json.dumps({"input": [ids("abc")] * 3 + [ids("d")]}))
    assert len(answer.json()["data"]) == 4
    assert max(len(output.scheduled) for output in engine.runner.outputs) == 4


def test_a_long_input_is_computed_in_chunks_and_a_small_pool_is_enough():
    many = [[*ids("x" * 40), 3 + number] for number in range(6)]
    answer = post({"input": many}, max_num_batched_tokens=16, num_blocks=14, max_num_seqs=4)
    assert [each["embedding"] for each in answer.json()["data"]] == list(map(numbers, many))


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "input must not be an empty list"),
        ({"input": [[]]}, "input[0]", "input[0] is empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": ["a", 5]}, "input", "a list of inputs must hold only texts"),
        ({"input": {"text": "a"}}, "input", "input must be text, token ids"),
        ({"input": [267]}, "input", "from 0 to 266"),
        ({"input": [[5], [-1]]}, "input[1]", "from 0 to 266"),
        ({"input": "\ud800"}, "input", "Unicode"),
        ({"input": [5] * 128}, "input", "input has 128 tokens, and at most 127 fit; shorten it"),
        ({"input": ["a", "b" * 100_000]}, "input[1]", "100000 characters"),
        ({"input": ["a"] * 1025}, "input", "at most 1024 items, got 1025"),
        ({"dimensions": 5}, "dimensions", "from 1 to 4, got 5"),
        ({"dimensions": 0}, "dimensions", "from 1 to 4, got 0"),
        ({"dimensions": 2.5}, "dimensions", "integer"),
        ({"encoding_format": "int8"}, "encoding_format", "float"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"priority": 1}, "priority", "policy"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(change, param, said):
    response = post({"input": "a", **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert "prompt" not in error["message"].replace("truncate_prompt_tokens", "")


def test_the_longest_input_that_fits_is_embedded():
    assert post({"input": [5] * 127}).json()["data"][0]["embedding"] == numbers([5] * 127)


def test_without_an_input_nothing_is_made():
    assert post({"input": None}).json()["error"]["param"] == "input"
    assert ask(engine_of(), "/v1/embeddings", "{}").json()["error"]["param"] == "input"


def test_another_model_is_not_found_and_an_unknown_field_is_warned_of():
    assert post({"input": "a", "model": "other"}).status_code == 404
    assert post({"input": "a", "colour": 1}).headers["X-Millpond-Warning"].endswith(": colour")


def test_a_model_that_is_not_made_for_it_says_so():
    response = post({"model": "tiny", "input": "a"}, embedding_size=0)
    assert response.status_code == 400
    assert (
        response.json()["error"]["message"]
        == "tiny makes no embeddings: it is a language model, or pools in a way of its own"
    )
    assert response.json()["error"]["code"] == "not_supported"


def test_a_fault_of_one_input_is_an_error_and_leaves_nothing_behind():
    engine = engine_of(faults={"embd-0-1": 0})
    response = ask(engine, "/v1/embeddings", json.dumps({"input": ["a", "b", "c"]}))
    assert response.status_code == 500
    assert engine.scheduler.requests == {}


def test_an_answer_in_words_carries_no_vector_and_needs_no_such_model():
    answer = ask(engine_of(), "/v1/completions", json.dumps({"prompt": "hi", "max_tokens": 2}))
    assert answer.status_code == 200
    assert "embedding" not in answer.text


@pytest.mark.parametrize("given", ["hi", ["hi", "the"], ids("ab"), [ids("ab"), ids("c")]])
def test_the_openai_client_gets_the_numbers(client, given):
    listed = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    expected = [numbers(encode(each) if isinstance(each, str) else each) for each in listed]
    answer = client.embeddings.create(model="tiny", input=given)  # in base64, which the client asks for
    assert [each.embedding for each in answer.data] == expected
    plain = client.embeddings.create(model="tiny", input=given, encoding_format="float")
    assert [each.embedding for each in plain.data] == [pytest.approx(each) for each in expected]
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0


def test_the_openai_client_names_the_limit(client):
    with pytest.raises(openai.BadRequestError, match="from 1 to 4") as caught:
        client.embeddings.create(model="tiny", input="hi", dimensions=1536)
    assert caught.value.param == "dimensions"
