from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import httpx
import openai
import pytest

from millpond.serve.run import serve, startup_lines
from tiny_engine import IM_END, ids, make_engine
from tiny_server import listening

HELLO = [{"role": "user", "content": "hi"}]
PARIS = [*ids("París 😀"), IM_END]


class Always:
    """A script that is the same for every request."""

    def __init__(self, tokens):
        self.tokens = tokens

    def get(self, request_id, default):
        return self.tokens


def engine_saying(tokens, **settings):
    engine = make_engine(**settings)
    engine.runner.script = Always(tokens)
    return engine


@pytest.fixture(scope="module")
def url():
    with listening(engine_saying(PARIS)) as server:
        yield server.url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_gets_a_chat_answer(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "París 😀"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(PARIS)


def test_the_openai_client_gets_a_streamed_chat_answer(client):
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "París 😀"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(PARIS)
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


def test_the_typed_stream_helper_sees_one_role_one_reason_and_the_whole_text(client):
    roles, reasons = [], []
    with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        for event in stream:
            if event.type == "chunk":
                choice = event.chunk.choices[0]
                roles += [choice.delta.role] if choice.delta.role else []
                reasons += [choice.finish_reason] if choice.finish_reason else []
        final = stream.get_final_completion()
    assert roles == ["assistant"]
    assert reasons == ["stop"]
    assert final.choices[0].message.content == "París 😀"


def test_the_openai_client_gets_completions_plain_and_streamed(client):
    whole = client.completions.create(model="tiny", prompt=["a", "b"])
    assert [choice.text for choice in whole.choices] == ["París 😀"] * 2
    stream = client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "París 😀"


def test_the_asynchronous_client_gets_many_answers_at_once(url):
    async def ask(client, number):
        if number % 2:
            answer = await client.chat.completions.create(model="tiny", messages=HELLO)
            return answer.choices[0].message.content
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def test():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    assert asyncio.run(test()) == ["París 😀"] * 12


def test_the_openai_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, n=0)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)


def test_the_openai_client_lists_the_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_failure_in_a_stream_is_an_error_of_the_client(caplog):
    with (
        listening(make_engine(raises={2: RuntimeError("boom")})) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError, match="forward pass"),
    ):
        list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))


def test_a_socket_closed_after_one_chunk_frees_the_engine():
    engine = make_engine(max_num_seqs=1, num_blocks=2600, max_model_len=10_000, audit=False)
    body = {"prompt": "hi", "max_tokens": 9000, "ignore_eos": True}
    with listening(engine) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            next(response.iter_lines())
        # The only slot is taken until the first request is gone.
        assert client.post("/v1/completions", json={**body, "max_tokens": 1}).status_code == 200
    assert len(engine.runner.outputs) < 9000


def test_a_port_in_use_is_an_error_of_the_caller():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            serve(make_engine(), port=taken.getsockname()[1])


def test_the_start_up_lines_give_url_model_threads_and_the_pool_with_its_reserve():
    lines = "\n".join(startup_lines(make_engine(watermark_blocks=3), "http://127.0.0.1:8000", ("tiny",)))
    for part in ("http://127.0.0.1:8000", "tiny", "2 threads", "64 blocks", "256 tokens", "3 blocks"):
        assert part in lines


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "256 tokens in bfloat16)"),
        ({"kv_memory": 256 * 46080}, "256 tokens in bfloat16, 46,080 bytes each)"),
        ({"kv_dtype": "int8", "kv_memory": 256 * 12600}, "256 tokens in int8, 12,600 bytes each)"),
        ({"dtype": "float32", "kv_memory": 256 * 999}, "256 tokens in float32, 999 bytes each)"),
    ],
)
def test_the_start_up_lines_say_what_the_pools_keys_and_values_are_and_what_a_token_takes(settings, told):
    engine = make_engine()
    engine.config = replace(engine.config, **settings)
    assert told in startup_lines(engine, "http://x", ("tiny",))[-1]


def test_the_start_up_lines_say_where_the_watermark_reserves_nothing():
    lines = startup_lines(make_engine(watermark_blocks=0), "http://x", ("tiny",))
    assert "the watermark reserves 0 blocks" in lines[-1]
    small = make_engine(watermark_blocks=0)
    small.config = replace(small.config, watermark_blocks=None)
    assert "(1% of 64 blocks is less than one)" in startup_lines(small, "http://x", ("tiny",))[-1]
    small.config = replace(small.config, watermark="auto")
    assert "reserves what running requests are likely to need (auto)" in startup_lines(small, "http://x", ("tiny",))[-1]
