"""Masks, log probabilities, choices and echo of the real model, asked by the OpenAI client over a real socket."""

from __future__ import annotations

import numpy as np
import openai
import pytest

from e2e.real import assert_nothing_is_left
from millpond.lab.fresh_engine import engine_over
from tiny_server import listening

pytestmark = pytest.mark.slow

COUNT = {"model": "smollm2", "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def engine(base):
    return engine_over(base)


@pytest.fixture(scope="module")
def client(engine):
    with (
        listening(engine, model_names=("smollm2",)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    assert_nothing_is_left(engine)


def expected_logprobs(engine, token_ids):
    """Of each token but the first, in double precision from the model's logits."""
    logits = engine.runner.logits(token_ids)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(token_ids) - 1), token_ids[1:]]


def test_a_scored_prompt_and_a_scored_answer_are_the_models_own_log_softmax(client, engine):
    text = "The capital of France is Paris. The capital of Italy is"
    token_ids = engine.tokenizer.encode(text)
    answer = client.completions.create(
        model="smollm2", prompt=token_ids, max_tokens=4, echo=True, logprobs=5, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text.startswith(text + " Rome")
    tokens = [*token_ids, *engine.tokenizer.encode(choice.text[len(text) :])]
    assert "".join(choice.logprobs.tokens) == choice.text
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected_logprobs(engine, tokens), atol=1e-4)
    assert all(5 <= len(top) <= 6 for top in choice.logprobs.top_logprobs[1:])
    alone = client.completions.create(model="smollm2", prompt=text, max_tokens=0, echo=True, logprobs=0)
    assert alone.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs[: len(token_ids)]


def test_two_choices_are_what_their_seeds_give_alone(client):
    request = {**COUNT, "prompt": "Once upon a time", "temperature": 0.9, "max_tokens": 12, "logprobs": 2}
    both = client.completions.create(**request, n=2, seed=7)
    alone = [client.completions.create(**request, seed=seed).choices[0] for seed in (7, 8)]
    assert [choice.text for choice in both.choices] == [choice.text for choice in alone]
    assert [choice.logprobs for choice in both.choices] == [choice.logprobs for choice in alone]
    assert both.choices[0].text != both.choices[1].text
    assert both.usage.prompt_tokens == 4


def test_a_bias_bans_and_forces_tokens(client, engine):
    six = engine.tokenizer.encode(" 6")
    plain = client.completions.create(**COUNT).choices[0].text
    banned = client.completions.create(**COUNT, logit_bias={str(each): -100 for each in six}).choices[0].text
    words = client.completions.create(**COUNT, extra_body={"bad_words": ["6"]}).choices[0].text
    assert plain.startswith(" 6")
    assert "6" not in banned[:3]
    assert " 6" not in words
    only = client.completions.create(**COUNT, extra_body={"allowed_token_ids": six, "ignore_eos": True})
    assert set(only.choices[0].text) <= set(" 6")


def test_the_bytes_of_an_emoji_that_was_forced_join_to_it(client, engine):
    emoji = "🦩"
    token_ids = engine.tokenizer.encode(emoji)
    assert len(token_ids) > 1
    assert any(engine.tokenizer.whole_text(each) is None for each in token_ids)
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=len(token_ids),
        temperature=0,
        logprobs=True,
        top_logprobs=5,
        extra_body={"allowed_token_ids": token_ids, "min_tokens": len(token_ids)},
    )
    (choice,) = answer.choices
    content = choice.logprobs.content
    assert b"".join(map(bytes, (entry.bytes for entry in content))).decode(errors="replace") == choice.message.content
    assert {len(entry.top_logprobs) for entry in content} == {5}
    assert all(entry.bytes != [239, 191, 189] for entry in content)
