"""The real model behind a real socket, asked by the OpenAI client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from e2e.real import Recorder, assert_nothing_is_left
from millpond.core.request import SamplingParams
from millpond.lab.fresh_engine import engine_over
from tiny_server import listening

pytestmark = pytest.mark.slow

CAPITAL = [{"role": "user", "content": "Name the capital of France."}]
QUESTION = {"model": "smollm2", "messages": CAPITAL, "temperature": 0, "max_tokens": 32}
COUNT = {"model": "smollm2", "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def engine(base):
    return engine_over(base, wrap=Recorder)


@pytest.fixture(scope="module")
def url(engine):
    with listening(engine, model_names=("smollm2",)) as server:
        yield f"{server.url}/v1"
    assert_nothing_is_left(engine)


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def asynchronous(url, work):
    async def test():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await work(client)

    return asyncio.run(test())


def test_the_capital_of_france_is_paris(client):
    answer = client.chat.completions.create(**QUESTION)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_the_capital_of_france_is_paris_in_a_stream_and_to_the_asynchronous_client(url, client):
    async def streamed(client):
        stream = await client.chat.completions.create(**QUESTION, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    with client.chat.completions.create(**QUESTION, stream=True) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "Paris" in "".join(pieces)
    assert "Paris" in asynchronous(url, streamed)


def test_a_stream_comes_in_pieces_that_join_to_the_whole_answer_with_the_same_usage(client, engine):
    whole = client.chat.completions.create(**QUESTION)
    with client.chat.completions.create(**QUESTION, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert len([delta for delta in deltas if delta.content]) >= whole.usage.completion_tokens // 2
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert engine.runner.token_ids[last.id] == engine.runner.token_ids[whole.id]


def test_usage_counts_the_templates_tokens_and_every_token_that_was_generated(client, engine):
    answer = client.chat.completions.create(**QUESTION)
    prompt = engine.chat_template.render(CAPITAL)
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(prompt, add_special_tokens=False))
    assert answer.usage.completion_tokens == len(engine.runner.token_ids[answer.id])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_answer_has_no_mark_of_the_template_in_it(client, engine):
    answer = client.chat.completions.create(**{**QUESTION, "max_tokens": 100})
    text, token_ids = answer.choices[0].message.content, engine.runner.token_ids[answer.id]
    assert "<|" not in text
    if answer.choices[0].finish_reason == "stop":
        assert token_ids[-1] in engine.tokenizer.eos_token_ids
        assert text == engine.tokenizer.decode(token_ids[:-1])


def test_completions_continue_each_prompt_of_a_list_in_its_place(client):
    other = "10, 20, 30, 40, 50,"
    both = client.completions.create(**{**COUNT, "prompt": [COUNT["prompt"], other]})
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text.startswith(" 6, 7")
    assert both.choices[1].text.startswith(" 60, 70")
    assert both.usage.completion_tokens == 16


def test_a_completion_streams_the_text_it_gives_whole(client):
    whole = client.completions.create(**COUNT).choices[0]
    with client.completions.create(**COUNT, stream=True) as stream:
        pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole.text
    assert (whole.finish_reason, len(pieces)) == ("length", 8)


def test_one_token_is_one_token_and_ends_with_length(client, engine):
    before = engine.runner.num_steps
    answer = client.completions.create(**{**COUNT, "max_tokens": 1})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "length")
    assert engine.runner.num_steps == before + 1


def test_a_prompt_of_token_ids_is_the_prompt_of_their_text(client, engine):
    ids = engine.tokenizer.encode(COUNT["prompt"])
    assert client.completions.create(**{**COUNT, "prompt": ids}).choices[0].text == (
        client.completions.create(**COUNT).choices[0].text
    )


@pytest.mark.parametrize("temperature", [0.8, 1e-7])
def test_the_same_seed_draws_the_same_answer_again(client, engine, temperature):
    request = {**COUNT, "prompt": "Once upon a time", "temperature": temperature, "max_tokens": 12}
    first, again, other = (client.completions.create(**request, seed=seed) for seed in (7, 7, 8))
    first, again, other = (engine.runner.token_ids[f"{each.id}-0"] for each in (first, again, other))
    assert first == again
    assert (first == other) == (temperature < 1e-6)


@pytest.mark.parametrize("order", [1, -1])
def test_eight_at_once_over_http_get_the_tokens_they_get_alone(url, engine, eight, alone, order):
    before = engine.runner.num_steps

    async def ask(client, name):
        fields = eight[name].body()
        extra = {field: fields.pop(field) for field in fields.keys() & {"top_k", "repetition_penalty", "ignore_eos"}}
        if name in ("chat", "story", "long"):
            stream = await client.completions.create(model="smollm2", **fields, extra_body=extra, stream=True)
            chunks = [chunk async for chunk in stream]
            text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
            return name, f"{chunks[0].id}-0", text, reason
        answer = await client.completions.create(model="smollm2", **fields, extra_body=extra)
        return name, f"{answer.id}-0", answer.choices[0].text, answer.choices[0].finish_reason

    answers = asynchronous(url, lambda client: asyncio.gather(*(ask(client, name) for name in list(eight)[::order])))
    for name, request_id, text, reason in answers:
        assert engine.runner.token_ids[request_id] == alone[name].token_ids, name
        assert (text, reason) == (alone[name].text, alone[name].finish_reason.value)
    # They ran together: one after another they take more than 140 steps.
    assert engine.runner.num_steps - before < 60


def test_the_defaults_of_the_api_are_what_a_bare_request_gets(client):
    answer = client.completions.create(model="smollm2", prompt="Once upon a time", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == SamplingParams().max_tokens == 16
