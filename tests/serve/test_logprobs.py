"""Log probabilities, echoed prompts and scored prompts over HTTP, on a scripted model whose scores are known."""

from __future__ import annotations

import pytest

from helpers import scripted_score
from millpond.core.step import TokenScore
from millpond.serve.logprobs import CompletionLogprobs, TokenNames
from tiny_engine import IM_END, ids, make_engine, tiny_tokenizer, tokenizer_with
from tiny_server import ask, chunks_of

HELLO = [{"role": "user", "content": "hi"}]
THE = 3 + 256 + 1  # the token of the merge "the"


def complete(body, **settings):
    return ask(make_engine(**settings), "/v1/completions", {"model": "tiny", "prompt": "hi", **body})


def chat(body, **settings):
    return ask(make_engine(**settings), "/v1/chat/completions", {"model": "tiny", "messages": HELLO, **body})


def logprob(token_id):
    return scripted_score(token_id, 0).logprob


def test_a_completions_logprobs_have_the_shape_of_openai():
    (choice,) = complete({"max_tokens": 2, "logprobs": 1}, script={"cmpl-0-0": ids("ab")}).json()["choices"]
    top = {"<|endoftext|>": -0.5}
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [logprob(100), logprob(101)],
        "top_logprobs": [{**top, "a": logprob(100)}, {**top, "b": logprob(101)}],
        "text_offset": [0, 1],
    }


def test_a_chats_logprobs_have_the_shape_of_openai():
    body = {"max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    (choice,) = chat(body, script={"chatcmpl-0": ids("ab")}).json()["choices"]
    top = [{"token": "<|endoftext|>", "logprob": -0.5, "bytes": None}]
    assert choice["logprobs"] == {
        "content": [
            {"token": "a", "logprob": logprob(100), "bytes": [97], "top_logprobs": top},
            {"token": "b", "logprob": logprob(101), "bytes": [98], "top_logprobs": top},
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_a_chat_gives_exactly_so_many_alternatives_though_names_may_be_alike(count):
    (choice,) = chat({"max_tokens": 3, "logprobs": True, "top_logprobs": count}).json()["choices"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [count] * 3


def test_logprobs_without_a_number_of_alternatives_are_those_of_the_tokens():
    (choice,) = chat({"max_tokens": 3, "logprobs": True}).json()["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]
    (choice,) = complete({"max_tokens": 1, "logprobs": 0}, script={"cmpl-0-0": ids("a")}).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": logprob(100)}]


@pytest.mark.parametrize("body", [{}, {"logprobs": None}, {"logprobs": False}])
def test_nobody_who_does_not_ask_gets_any(body):
    (choice,) = chat({"max_tokens": 2, **body}).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"logprobs": "5"}, "logprobs"),
        ("/v1/completions", {"top_logprobs": 5}, "top_logprobs"),
        ("/v1/completions", {"echo": 1}, "echo"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"max_tokens": -1, "echo": True}, "max_tokens"),
        ("/v1/completions", {"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 5}, "logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 5}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
        ("/v1/chat/completions", {"echo": True}, "echo"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(path, body, param):
    base = {"prompt": "hi"} if path == "/v1/completions" else {"messages": HELLO}
    response = ask(make_engine(), path, {**base, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


EMOJI = "a😀é!"


def test_the_bytes_of_a_chats_tokens_join_to_its_text_though_characters_are_cut():
    script = {"chatcmpl-0": [*ids(EMOJI), IM_END]}
    body = chat({"max_tokens": 20, "logprobs": True}, script=script).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"] or ()).decode() == EMOJI
    assert len(content) == body["usage"]["completion_tokens"] == 9
    assert [entry["token"] for entry in content[:3]] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    assert content[-1] == {**content[-1], "token": "<|im_end|>", "bytes": None}


def test_a_special_token_that_is_shown_has_its_bytes():
    script = {"chatcmpl-0": [1, *ids("a")]}
    body = chat({"max_tokens": 2, "logprobs": True, "skip_special_tokens": False}, script=script).json()
    assert bytes(body["choices"][0]["logprobs"]["content"][0]["bytes"]) == b"<|im_start|>"


def test_text_offsets_are_places_in_the_text():
    script = {"cmpl-0-0": [*ids("a😀"), THE, IM_END]}
    (choice,) = complete({"max_tokens": 20, "logprobs": 0}, script=script).json()["choices"]
    assert choice["text"] == "a😀the"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 5]


@pytest.mark.parametrize("prompt", ["hi the", ids("hi the")])
@pytest.mark.parametrize("stream", [False, True])
def test_the_scoring_call_echoes_the_prompt_with_its_scores_and_no_token_more(prompt, stream):
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    engine = make_engine(max_num_batched_tokens=4)
    response = ask(engine, "/v1/completions", body)
    assert response.status_code == 200, response.text
    (choice,) = chunks_of(response)[0]["choices"] if stream else response.json()["choices"]
    token_ids = engine.runner.admissions[0][2].prompt_token_ids
    assert (choice["text"], choice["finish_reason"]) == ("hi the", "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *map(logprob, token_ids[1:])]
    assert "".join(logprobs["tokens"]) == "hi the"
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    if not stream:
        usage = response.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(token_ids), 0)


def test_a_prompt_is_scored_in_full_however_often_its_start_was_computed_before():
    """What is found in the prefix cache has no scores."""
    engine, prompt = make_engine(block_size=4), ids("abcdefghi")
    prompts = [prompt] * 3
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 0}
    choices = ask(engine, "/v1/completions", body).json()["choices"]
    scores = [None, *map(logprob, prompt[1:])]
    assert [choice["logprobs"]["token_logprobs"][: len(prompt)] for choice in choices] == [scores] * 3
    counters = engine.scheduler.counters
    assert (counters.queried_tokens, counters.hit_tokens) == (0, 0)
    assert counters.forward_tokens == 3 * len(prompt)


def test_prompts_of_unequal_length_are_scored_each_by_itself():
    prompts = [ids("abcdefg"), ids("h"), ids("ij")]
    body = complete({"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0}, max_num_batched_tokens=5).json()
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [
        [None, *map(logprob, prompt[1:])] for prompt in prompts
    ]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 0,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_stands_before_the_answer_and_its_scores_before_the_answers(stream):
    script = {"cmpl-0-0": ids("xyz")}
    response = complete({"echo": True, "max_tokens": 3, "logprobs": 0, "stream": stream}, script=script)
    choices = [each["choices"][0] for each in (chunks_of(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "hixyz"
    names = ("tokens", "token_logprobs", "text_offset")
    tokens, logprobs, offsets = ([each for choice in choices for each in choice["logprobs"][name]] for name in names)
    assert tokens == ["h", "i", "x", "y", "z"]
    assert logprobs == [None, *map(logprob, ids("ixyz"))]
    assert offsets == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_at_the_prompts_end_stays_half_of_one(stream):
    prompt, rest = ids("é")[:1], ids("é")[1:]
    body = {"prompt": prompt, "echo": True, "max_tokens": 2, "logprobs": 0, "stream": stream}
    response = complete(body, script={"cmpl-0-0": [*rest, *ids("x")]})
    choices = [each["choices"][0] for each in (chunks_of(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "\ufffd\ufffdx"
    assert [each for choice in choices for each in choice["logprobs"]["text_offset"]] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_logprobs_is_text_alone(stream):
    response = complete({"echo": True, "max_tokens": 2, "stream": stream}, script={"cmpl-0-0": ids("xy")})
    choices = [each["choices"][0] for each in (chunks_of(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "hixy"
    assert all(choice["logprobs"] is None for choice in choices)


def test_a_begin_token_is_a_token_of_the_prompt_and_shows_in_the_text_only_if_special_tokens_do():
    engine = {"tokenizer": tokenizer_with(ggml__add_bos_token=True)}
    body = {"echo": True, "max_tokens": 0, "logprobs": 0}
    for skip, text, offsets in ((True, "hi", [0, 0, 1]), (False, "<|im_start|>hi", [0, 12, 13])):
        (choice,) = complete({**body, "skip_special_tokens": skip}, **engine).json()["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)
        assert choice["logprobs"]["tokens"] == ["<|im_start|>", "h", "i"]


def test_prompt_logprobs_are_told_as_vllm_tells_them():
    entry = {"0": {"logprob": -0.5, "rank": 1, "decoded_token": "<|endoftext|>"}}
    own = {str(108): {"logprob": logprob(108), "rank": 109, "decoded_token": "i"}}
    (choice,) = complete({"prompt_logprobs": 1, "max_tokens": 1}).json()["choices"]
    assert choice["prompt_logprobs"] == [None, {**entry, **own}]
    assert choice["logprobs"] is None
    body = chat({"prompt_logprobs": 0, "max_tokens": 1}).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in complete({"max_tokens": 1}).json()["choices"][0]


def test_an_echo_with_more_logprobs_leaves_the_prompt_logprobs_as_few_as_asked_for():
    body = {"prompt_logprobs": 1, "echo": True, "logprobs": 3, "max_tokens": 1}
    (choice,) = complete(body).json()["choices"]
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [2]
    assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:]] == [4, 4]


def test_a_streamed_chat_tells_each_token_once():
    script = {"chatcmpl-0": [*ids(EMOJI), IM_END]}
    whole = chat({"max_tokens": 20, "logprobs": True, "top_logprobs": 2}, script=script).json()
    chunks = chunks_of(chat({"max_tokens": 20, "logprobs": True, "top_logprobs": 2, "stream": True}, script=script))
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert told == whole["choices"][0]["logprobs"]["content"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == EMOJI


def test_of_two_tokens_with_one_name_a_completion_tells_the_likelier():
    names = TokenNames(tiny_tokenizer(), True)
    score = TokenScore(100, -2.0, 2, ((100, -1.0), (101, -3.0), (100, -4.0)))
    assert CompletionLogprobs(names).output([score])["top_logprobs"] == [{"a": -1.0, "b": -3.0}]
