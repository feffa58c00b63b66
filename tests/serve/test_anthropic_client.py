"""/v1/messages as the official client of Anthropic uses it, against a server on a socket."""

from __future__ import annotations

import anthropic
import pytest

from tiny_engine import IM_END, ids, make_engine, run, tiny_tokenizer
from tiny_server import listening

HELLO = [{"role": "user", "content": "hi"}]
NUM_PROMPT_TOKENS = len(tiny_tokenizer().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))


class Always:
    """A script that says the same to everyone."""

    def get(self, request_id, default):
        return [*ids("añ😀!"), IM_END]


@pytest.fixture(scope="module")
def url():
    engine = make_engine()
    engine.runner.script = Always()
    with listening(engine) as server:
        yield server.url


@pytest.fixture
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask_client(client, **fields):
    return client.messages.create(**{"model": "tiny", "max_tokens": 20, "messages": HELLO, **fields})


def prompt_tokens(message):
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_the_client_gets_a_message(client):
    message = ask_client(client, system="brief", metadata={"user_id": "me"}, extra_body={"temperature": 0})
    assert isinstance(message.content[0], anthropic.types.TextBlock)
    assert (message.content[0].text, message.stop_reason) == ("añ😀!", "end_turn")
    again = ask_client(client, messages=[*HELLO, message.to_param(), *HELLO])
    assert prompt_tokens(again) > prompt_tokens(message)


def test_the_client_counts_what_the_message_uses(client):
    fields = {"model": "tiny", "messages": HELLO, "system": [{"type": "text", "text": "brief"}]}
    counted = client.messages.count_tokens(**fields)
    assert counted.input_tokens == prompt_tokens(client.messages.create(max_tokens=5, **fields))


def test_the_clients_stream_joins_to_the_message(client):
    with client.messages.stream(model="tiny", max_tokens=20, messages=HELLO, stop_sequences=["!"]) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert pieces == ["a", "ñ", "😀"]
    assert final.content[0].text == "".join(pieces)
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "!")
    assert (prompt_tokens(final), final.usage.output_tokens) == (NUM_PROMPT_TOKENS, len(ids("añ😀!")))


def test_the_asynchronous_client_streams_events(url):
    async def test():
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            stream = await ask_client(client, stream=True)
            return [event async for event in stream]

    events = run(test())
    assert [event.type for event in events][:2] == ["message_start", "content_block_start"]
    assert [event.type for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2].usage.output_tokens == len(Always().get("", None))


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_clients_own_error(client, stream):
    with pytest.raises(anthropic.BadRequestError, match="tools is not supported yet"):
        ask_client(client, stream=stream, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    with pytest.raises(anthropic.NotFoundError, match="no model 'claude' here"):
        ask_client(client, stream=stream, model="claude")


def test_a_failure_in_a_stream_is_the_clients_own_error(caplog):
    engine = make_engine(raises={2: RuntimeError("boom")})
    with (
        listening(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="the forward pass of this step failed"),
    ):
        list(ask_client(client, stream=True))


def test_the_clients_key_is_one_of_the_servers():
    with listening(make_engine(), api_keys=("right",)) as server:
        for key, error in (("right", None), ("wrong", anthropic.AuthenticationError)):
            with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
                if error is None:
                    assert ask_client(client, max_tokens=2).usage.output_tokens == 2
                else:
                    with pytest.raises(error, match="wants an API key"):
                        ask_client(client)
