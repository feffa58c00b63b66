"""The real model in the other two shapes, asked by their official clients over a real socket."""

from __future__ import annotations

import anthropic
import openai
import pytest

from e2e.real import assert_nothing_is_left
from millpond.lab.fresh_engine import engine_over
from tiny_server import listening

pytestmark = pytest.mark.slow

ASKED = [{"role": "user", "content": "Name the capital of France."}]
MESSAGES = {
    "model": "smollm2",
    "system": "Be brief.",
    "messages": ASKED,
    "max_tokens": 32,
    "extra_body": {"temperature": 0},
}
RESPONSES = {
    "model": "smollm2",
    "instructions": "Be brief.",
    "input": "Name the capital of France.",
    "max_output_tokens": 32,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def clients(base):
    engine = engine_over(base)
    with (
        listening(engine, model_names=("smollm2",)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as anthropics,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openais,
    ):
        yield anthropics, openais
    assert_nothing_is_left(engine)


def test_every_shape_gives_the_answer_of_the_chat_route_and_counts_it_alike(clients):
    anthropics, openais = clients
    chat = openais.chat.completions.create(
        model="smollm2", messages=[{"role": "system", "content": "Be brief."}, *ASKED], temperature=0, max_tokens=32
    )
    message, response = anthropics.messages.create(**MESSAGES), openais.responses.create(**RESPONSES)
    with anthropics.messages.stream(**MESSAGES) as stream:
        pieces, streamed_message = list(stream.text_stream), stream.get_final_message()
    with openais.responses.stream(**RESPONSES) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed_response = stream.get_final_response()

    text, usage = chat.choices[0].message.content, (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert "Paris" in text
    texts = message.content[0].text, response.output_text, "".join(pieces), "".join(deltas)
    assert set(texts) == {text}
    assert len(pieces) == len(deltas) > 1
    for each in (message, response, streamed_message, streamed_response):
        assert (each.usage.input_tokens, each.usage.output_tokens) == usage
    counted = anthropics.messages.count_tokens(model="smollm2", system="Be brief.", messages=ASKED)
    assert counted.input_tokens == usage[0]


def test_an_answer_goes_on_with_what_was_begun_and_stops_where_it_was_told(clients):
    anthropics, _ = clients
    begun = [*ASKED, {"role": "assistant", "content": "The capital of France is"}]
    message = anthropics.messages.create(**{**MESSAGES, "messages": begun, "stop_sequences": ["ris"]})
    assert (message.content[0].text, message.stop_sequence) == (" Pa", "ris")
    assert message.stop_reason == "stop_sequence"


def test_a_response_that_is_cut_says_so(clients):
    _, openais = clients
    *_, last = openais.responses.create(**{**RESPONSES, "max_output_tokens": 2}, stream=True)
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
