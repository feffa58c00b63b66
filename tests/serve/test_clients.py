"""The surface as public clients use it over a socket: those of OpenAI, LangChain, and the Hugging Face hub."""

from __future__ import annotations

import asyncio

import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import BadRequestError

from helpers import scripted_score
from tiny_engine import IM_END, ids, make_engine, tiny_tokenizer
from tiny_server import listening

HELLO = [{"role": "user", "content": "hi"}]
SAID = "añ😀!"
TOKENS = [*ids(SAID), IM_END]


class Always:
    """A script that says the same to everyone."""

    def get(self, request_id, default):
        return TOKENS


@pytest.fixture(scope="module")
def url():
    engine = make_engine()
    engine.runner.script = Always()
    with listening(engine) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_choices_with_logprobs_come_typed(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, logprobs=True, top_logprobs=2, seed=1, max_completion_tokens=20
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.content == SAID
        content = choice.logprobs.content
        assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == SAID
        assert [entry.logprob for entry in content] == [scripted_score(token, 0).logprob for token in TOKENS]
        assert {len(entry.top_logprobs) for entry in content} == {2}
    assert answer.usage.completion_tokens == 2 * len(TOKENS)


def test_a_completion_is_scored_and_echoed_as_a_harness_asks_for_it(client):
    prompt = ids("score this")
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=1, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == ("score this", "length", 0)
    assert choice.logprobs.token_logprobs == [None, *(scripted_score(token, 0).logprob for token in prompt[1:])]


def test_the_stream_helper_joins_choices_and_their_logprobs(client):
    with client.chat.completions.stream(model="tiny", messages=HELLO, n=2, logprobs=True) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds
    assert [choice.message.content for choice in final.choices] == [SAID, SAID]
    assert [len(choice.logprobs.content) for choice in final.choices] == [len(TOKENS)] * 2


def test_the_asynchronous_client_streams_choices_by_their_index(url):
    async def test():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="tiny", prompt=["a", "b"], n=2, stream=True, logprobs=0, stream_options={"include_usage": True}
            )
            return [chunk async for chunk in stream]

    *chunks, last = asyncio.run(test())
    texts = ["".join(each.choices[0].text for each in chunks if each.choices[0].index == i) for i in range(4)]
    assert texts == [SAID] * 4
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 4 * len(TOKENS))


def test_what_openais_types_know_and_the_engine_takes_works(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "two"},
        ],
        logit_bias={"100": -100, "101": 5},
        stop=["x"] * 4,
        response_format={"type": "text"},
        user="me",
        extra_body={
            "min_tokens": 1,
            "bad_words": ["q"],
            "allowed_token_ids": [100, 101],
            "chat_template_kwargs": {"colour": "red"},
        },
    )
    assert answer.choices[0].message.content == SAID


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"267": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_clients_own_error_with_the_parameter(client, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=stream, **fields)
    assert caught.value.param == param


def test_a_warning_can_be_read_from_the_raw_response(client):
    raw = client.completions.with_raw_response.create(model="tiny", prompt="hi", extra_body={"temprature": 1})
    assert raw.headers["X-Millpond-Warning"] == "unknown fields were ignored: temprature"
    assert raw.parse().choices[0].text == SAID


def test_embeddings_are_refused_at_once(client):
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model="tiny", input="hi")


@pytest.fixture
def chain(url):
    # Here, since it takes seconds to import.
    from langchain_openai import ChatOpenAI

    def model(**settings):
        return ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, **settings)

    return model


@pytest.fixture(scope="module")
def num_prompt_tokens():
    return len(tiny_tokenizer().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))


def test_langchain_counts_a_stream_as_it_counts_a_whole_answer(chain, num_prompt_tokens):
    """It adds the usage of all chunks up, so that no more than one may carry any."""
    whole = chain().invoke("hi")
    pieces = list(chain(stream_usage=True).stream("hi"))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert joined.content == whole.content == SAID
    for usage in (whole.usage_metadata, joined.usage_metadata):
        assert (usage["input_tokens"], usage["output_tokens"]) == (num_prompt_tokens, len(TOKENS))


def test_langchain_gets_logprobs_and_several_choices(chain):
    from langchain_core.messages import HumanMessage

    answer = chain(logprobs=True, top_logprobs=1).invoke("hi")
    content = answer.response_metadata["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [scripted_score(token, 0).logprob for token in TOKENS]
    (several,) = chain(n=3).generate([[HumanMessage("hi")]]).generations
    assert [each.text for each in several] == [SAID] * 3


def test_the_client_of_the_hub_gets_a_whole_answer_and_a_stream_with_scores_and_usage(url):
    client = InferenceClient(base_url=url, api_key="none")
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "logprobs": True, "top_logprobs": 1, "seed": 1}
    whole = client.chat_completion(**asked)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    scores = [scripted_score(token, 0).logprob for token in TOKENS]
    assert [entry.logprob for entry in choice.logprobs.content] == scores
    chunks = list(client.chat_completion(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == SAID
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(TOKENS)


def test_the_client_of_the_hub_raises_what_is_refused_with_the_fields_name(url):
    client = InferenceClient(base_url=url, api_key="none")
    with pytest.raises(BadRequestError, match="top_logprobs"):
        client.chat_completion(model="tiny", messages=HELLO, logprobs=True, top_logprobs=21)
