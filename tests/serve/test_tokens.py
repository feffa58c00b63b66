from __future__ import annotations

import json

import pytest

from tiny_engine import ids, make_engine, tiny_tokenizer, tokenizer_with
from tiny_server import ask

HELLO = [{"role": "user", "content": "hi"}]


def post(path, body, **settings):
    return ask(make_engine(**settings), path, json.dumps(body))


def test_a_text_is_tokenized_as_a_prompt_would_be():
    token_ids = tiny_tokenizer().encode("hi the")
    assert post("/tokenize", {"model": "tiny", "prompt": "hi the"}).json() == {
        "count": len(token_ids),
        "max_model_len": 128,
        "tokens": token_ids,
        "token_strs": None,
    }


@pytest.mark.parametrize(("add", "count"), [(None, 3), (True, 3), (False, 2)])
def test_special_tokens_are_added_unless_they_are_not_wanted(add, count):
    tokenizer = tokenizer_with(ggml__add_bos_token=True)
    assert post("/tokenize", {"prompt": "hi", "add_special_tokens": add}, tokenizer=tokenizer).json()["count"] == count


def test_messages_are_tokenized_through_the_chat_template():
    body = {"messages": HELLO, "add_generation_prompt": False, "return_token_strs": True}
    answer = post("/tokenize", body).json()
    assert answer["tokens"] == tiny_tokenizer().encode("<|im_start|>user\nhi<|im_end|>\n")
    assert answer["token_strs"][0] == "<|im_start|>"
    assert "".join(answer["token_strs"]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_an_empty_text_has_no_token_and_half_a_character_has_a_name():
    assert post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    answer = post("/tokenize", {"prompt": "é", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_tokens_become_the_text_that_they_were_special_ones_too():
    text = "<|im_start|>a😀\0"
    tokens = post("/tokenize", {"prompt": text}).json()["tokens"]
    assert post("/detokenize", {"model": "tiny", "tokens": tokens}).json() == {"prompt": text}
    assert post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert post("/detokenize", {"tokens": ids("ab")}).json() == {"prompt": "ab"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a" * 10**6}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5, 267]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_what_cannot_be_turned_is_refused_by_name(path, body, param):
    response = post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_not_found_and_an_unknown_field_is_warned_of(path):
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [5]}
    assert post(path, {**body, "model": "other"}).status_code == 404
    assert post(path, {**body, "colour": 1}).headers["X-Millpond-Warning"].endswith(": colour")
