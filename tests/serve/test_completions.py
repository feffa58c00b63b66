from __future__ import annotations

import json

import pytest

from millpond.serve.protocol import CompletionRequest
from tiny_engine import IM_END, GatedRunner, ids, make_engine, run, steps_of, tokenizer_with
from tiny_server import NOW, ask, chunks_of, events_of, started

PATH = "/v1/completions"


def complete(body, engine=None, **settings):
    return ask(engine or make_engine(**settings), PATH, {"model": "tiny", "prompt": "hi", **body})


def test_a_completion_has_the_shape_of_openai():
    response = complete({"max_tokens": 3}, script={"cmpl-0-0": ids("abc")})
    assert response.status_code == 200
    assert response.json() == {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": NOW,
        "model": "tiny",
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_max_tokens_is_16_where_it_is_not_given():
    for body in ({}, {"max_tokens": None}):
        assert complete({"ignore_eos": True, **body}).json()["usage"]["completion_tokens"] == 16


def test_the_end_token_counts_but_does_not_show():
    body = complete({"max_tokens": 9}, script={"cmpl-0-0": [*ids("ok"), IM_END]}).json()
    assert body["choices"][0] == {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [("hi", [2]), (["hi", "abc"], [2, 3]), (ids("hi"), [2]), ([ids("hi"), ids("abc"), [5]], [2, 3, 1])],
)
def test_each_prompt_gets_one_choice_in_its_order(prompt, num_tokens):
    script = {f"cmpl-0-{index}": ids(f"answer{index}") for index in range(len(num_tokens))}
    body = complete({"prompt": prompt, "max_tokens": 7}, script=script).json()
    assert [choice["text"] for choice in body["choices"]] == [f"answer{index}" for index in range(len(num_tokens))]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(num_tokens)))
    assert body["usage"]["prompt_tokens"] == sum(num_tokens)
    assert body["usage"]["completion_tokens"] == 7 * len(num_tokens)


def test_text_and_its_token_ids_are_the_same_prompt():
    texts = {
        complete({"prompt": prompt, "max_tokens": 8}).json()["choices"][0]["text"] for prompt in ("xyz", ids("xyz"))
    }
    assert len(texts) == 1


def test_text_gets_the_models_special_tokens_and_ids_do_not():
    tokenizer = tokenizer_with(ggml__add_bos_token=True)
    for prompt, count in (("hi", 3), (ids("hi"), 2)):
        body = complete({"prompt": prompt}, make_engine(tokenizer=tokenizer)).json()
        assert body["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], [[5], []], None, 5, [5, "a"], ["a", [5]], [True], [1.5]]
)
def test_prompts_with_nothing_to_continue_or_of_mixed_kinds_are_refused(prompt):
    engine = make_engine()
    response = complete({"prompt": prompt}, engine)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")
    assert engine.runner.outputs == []


@pytest.mark.parametrize("bad", ["", [], [300], [5] * 500, "a" * 10**6])
def test_a_prompt_of_a_list_that_is_refused_is_named_by_its_place(bad):
    good = "a" if isinstance(bad, str) else [5]
    response = complete({"prompt": [good, bad]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt[1]"


def test_an_empty_text_is_a_prompt_where_the_model_begins_with_a_token():
    engine = make_engine(tokenizer=tokenizer_with(ggml__add_bos_token=True))
    assert complete({"prompt": ""}, engine).json()["usage"]["prompt_tokens"] == 1


def test_a_single_space_is_a_prompt():
    assert complete({"prompt": " "}).json()["usage"]["prompt_tokens"] == 1


def test_a_missing_prompt_is_named():
    response = ask(make_engine(), PATH, {"model": "tiny"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert "required" in response.json()["error"]["message"]


def test_too_many_prompts_are_refused():
    response = complete({"prompt": ["a"] * 1025})
    assert response.status_code == 400
    assert "1024" in response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [[5, 6], ["a", "b"], [[5], [6]]])
def test_a_list_is_checked_once_and_not_copied_by_trying_what_else_it_could_be(prompt):
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt is prompt


def test_asking_for_more_than_fits_names_limit_prompt_and_request_streamed_or_not():
    messages = set()
    for stream in (False, True):
        response = complete({"max_tokens": 10**9, "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"
        messages.add(response.json()["error"]["message"])
    (message,) = messages
    assert all(number in message for number in ("max_model_len 128", "2 tokens", str(10**9)))


def test_an_id_outside_the_vocabulary_is_refused_before_a_stream_begins():
    for stream in (False, True):
        response = complete({"prompt": [5, 267], "stream": stream})
        assert response.status_code == 400
        assert "267" in response.json()["error"]["message"]


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *args, **settings: pytest.fail("tokenized"))
    response = complete({"prompt": "a" * 10**6}, engine)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert "1000000 characters" in response.json()["error"]["message"]


@pytest.mark.parametrize(("characters", "off_loop"), [(10, False), (5000, True)])
def test_long_text_is_tokenized_off_the_event_loop(characters, off_loop, monkeypatch):
    import threading

    engine = make_engine(max_model_len=10_000, num_blocks=2000)
    threads = []
    original = type(engine.tokenizer).encode

    def recorded(self, text, **settings):
        threads.append(threading.current_thread())
        return original(self, text, **settings)

    monkeypatch.setattr(type(engine.tokenizer), "encode", recorded)
    assert complete({"prompt": "a" * characters, "max_tokens": 1}, engine).status_code == 200
    assert (threads[0] is not threading.main_thread()) == off_loop


def test_a_stream_joins_to_the_whole_answer():
    script = {"cmpl-0-0": [*ids("añ€😀!"), IM_END]}
    whole = complete({"max_tokens": 50}, script=script).json()
    chunks = chunks_of(complete({"max_tokens": 50, "stream": True}, script=script))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"] == "añ€😀!"
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["stop"]
    assert {(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        ("cmpl-0", NOW, "text_completion", "tiny")
    }
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("include_usage", [False, True])
def test_every_event_of_a_stream_is_the_compact_json_of_its_object(include_usage):
    text = 'a"b\\c\n\0é👩\u2028'
    script = {"cmpl-0-0": [*ids(text), IM_END], "cmpl-0-1": [*ids(text), IM_END]}
    body = {"prompt": ["a", "b"], "max_tokens": 50, "stream": True, "stream_options": {"include_usage": include_usage}}
    *events, _ = events_of(complete(body, script=script))
    chunks = [json.loads(event) for event in events]
    assert events == [json.dumps(chunk, separators=(",", ":")) for chunk in chunks]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert ["".join(each["text"] for each in choices if each["index"] == index) for index in (0, 1)] == [text, text]
    assert [list(chunk)[5:] for chunk in chunks] == [["usage"] * include_usage] * len(chunks)


def test_a_stream_of_several_prompts_carries_each_index_to_its_own_end():
    script = {"cmpl-0-0": ids("one"), "cmpl-0-1": ids("three")}
    chunks = chunks_of(complete({"prompt": ["a", "b"], "max_tokens": 3, "stream": True}, script=script))
    texts, reasons = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == {0: "one", 1: "thr"}
    assert reasons == {0: [None, None, "length"], 1: [None, None, "length"]}


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None])
def test_usage_comes_once_at_the_end_and_only_where_asked_for(options):
    body = {"prompt": ["a", "bc"], "max_tokens": 4, "ignore_eos": True}
    total = complete(body).json()["usage"]
    chunks = chunks_of(complete({**body, "stream": True, "stream_options": options}))
    if options == {"include_usage": True}:
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == total
    else:
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_does_not_change_with_the_size_of_prefill_chunks():
    usages = [
        complete({"prompt": "abcdefgh", "max_tokens": 4, "ignore_eos": True}, max_num_batched_tokens=budget).json()[
            "usage"
        ]
        for budget in (4, 5, 64)
    ]
    assert (
        usages
        == [
            {
                "prompt_tokens": 8,
                "completion_tokens": 4,
                "total_tokens": 12,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
        ]
        * 3
    )


def test_stream_options_without_stream_are_refused():
    for stream in (False, None):
        response = complete({"stream": stream, "stream_options": {"include_usage": True}})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("step", [0, 3])
def test_a_forward_that_fails_is_a_500_or_an_error_event_without_done(step, caplog):
    failing = {"raises": {step: RuntimeError("secret")}}
    response = complete({}, **failing)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    streamed = complete({"stream": True}, **failing)
    *chunks, last = events_of(streamed)
    assert len(chunks) == step
    assert '"error"' in last
    assert "secret" not in streamed.text + response.text


def test_a_fault_of_one_prompt_aborts_its_siblings_within_a_step():
    engine = make_engine(wrap=GatedRunner, faults={"cmpl-0-1": 2})

    async def test():
        async with started(engine) as (_, client):
            engine.runner.let_through(3)
            body = {"prompt": ["a", "b", "c"], "max_tokens": 100, "ignore_eos": True}
            response = await client.post(PATH, json=body)
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "the logits are not finite"
            engine.runner.open_for_good()
            assert (await client.post(PATH, json={"prompt": "a", "max_tokens": 1})).status_code == 200

    run(test())
    assert steps_of(engine.runner.inner, "cmpl-0-1") == 3
    assert all(steps_of(engine.runner.inner, f"cmpl-0-{index}") <= 4 for index in (0, 2))
    assert engine.scheduler.pool.num_free == 64


@pytest.mark.parametrize("step", [0, 3])
def test_a_dead_engine_is_a_503_or_an_error_event_and_then_503_at_once(step, caplog):
    async def test(stream):
        async with started(make_engine(raises={step: SystemExit()})) as (_, client):
            assert (await client.get("/health")).status_code == 200
            response = await client.post(PATH, json={"prompt": "a", "stream": stream})
            if stream:
                assert "engine has died" in events_of(response)[-1]
            else:
                assert response.status_code == 503
            assert (await client.get("/health")).status_code == 503
            for path, body in ((PATH, {"prompt": "a"}), (PATH, {"prompt": "a", "stream": True})):
                late = await client.post(path, json=body)
                assert late.status_code == 503
                assert late.json()["error"]["code"] == "engine_dead"

    run(test(True))
    run(test(False))
