"""What of a prompt was found in the prefix cache, in the usage of every shape."""

from __future__ import annotations

import json

import pytest

from millpond.core.sampling import SamplingParams
from tiny_engine import ids, make_engine, run
from tiny_server import started

COMPLETION = ("/v1/completions", {"prompt": ids("abcdefghijk"), "max_tokens": 2})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2})
MESSAGES = ("/v1/messages", CHAT[1])
RESPONSES = ("/v1/responses", {"input": "hello", "max_output_tokens": 2})
OPENAI = {"stream_options": {"include_usage": True}}


def usages_of(path, body, **settings):
    """The usage of two answers to one body, the second with the first one's prompt in the cache, and the engine."""
    engine = make_engine(**settings)

    async def test():
        async with started(engine) as (_, client):
            responses = [await client.post(path, json=body) for _ in range(2)]
            return [_usage(response, bool(body.get("stream"))) for response in responses]

    return run(test()), engine


def _usage(response, is_stream):
    assert response.status_code == 200, response.text
    if not is_stream:
        return response.json()["usage"]
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    last = [json.loads(each) for each in data if "usage" in each][-1]
    return last.get("response", last)["usage"]


def _cached(path, usage):
    """(found tokens, all of the prompt) of a usage."""
    if path == "/v1/messages":
        return usage["cache_read_input_tokens"], usage["input_tokens"] + usage["cache_read_input_tokens"]
    if path == "/v1/responses":
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_the_second_of_two_prompts_tells_what_it_found(path, body, stream):
    asked = OPENAI if stream and (path, body) in (COMPLETION, CHAT) else {}
    (first, second), _ = usages_of(path, {**body, **asked, "stream": stream})
    found, whole = _cached(path, second)
    assert _cached(path, first) == (0, whole)
    assert found == (whole - 1) // 4 * 4 > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_is_told_is_what_the_scheduler_counts(prefix_cache):
    (_, second), engine = usages_of(*COMPLETION, prefix_cache=prefix_cache)
    assert _cached(COMPLETION[0], second)[0] == engine.scheduler.counters.hit_tokens == 8 * prefix_cache


def test_choices_of_one_prompt_tell_what_was_there_before_the_first_of_them():
    path, body = COMPLETION
    (first, second), engine = usages_of(path, {**body, "prompt": [body["prompt"], ids("xyzuv")], "n": 3})
    assert engine.scheduler.counters.hit_tokens > 3 * (8 + 4)
    assert (_cached(path, first), _cached(path, second)) == ((0, 16), (12, 16))


def test_a_request_that_is_preempted_tells_what_its_prompt_found_at_first():
    engine = make_engine(num_blocks=6, max_num_seqs=2, watermark_blocks=0)
    settings = SamplingParams(max_tokens=10, ignore_eos=True)
    outputs = []
    engine.add_request("a", ids("abcdef"), settings)
    outputs += engine.step()
    engine.add_request("b", ids("abcdxy"), settings)
    while engine.has_unfinished:
        outputs += engine.step()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.scheduler.counters.resumed_hit_tokens > 4
    assert {(each.request_id, each.num_cached_tokens) for each in outputs} == {("a", 0), ("b", 4)}
