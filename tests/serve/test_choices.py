"""n choices of one prompt: each with its own index, seed and end; the prompt counted once."""

from __future__ import annotations

import asyncio

import pytest

from tiny_engine import GatedRunner, ids, make_engine, run, steps_of
from tiny_server import HandDriven, app_over, ask, chunks_of, started

HELLO = [{"role": "user", "content": "hi"}]
PATHS = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": HELLO}}
STEMS = {"/v1/completions": "cmpl-0", "/v1/chat/completions": "chatcmpl-0"}
each_path = pytest.mark.parametrize("path", PATHS)


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def delta_of(choice):
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@each_path
@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_has_its_index_its_text_and_its_own_end(path, stream):
    script = {f"{STEMS[path]}-{index}": [*ids("abc"[:index]), 2] for index in range(4)}
    response = ask(make_engine(script=script), path, {**PATHS[path], "n": 4, "max_tokens": 2, "stream": stream})
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks_of(response)]
        texts = ["".join(delta_of(each) for each in choices if each["index"] == index) for index in range(4)]
        reasons = [[each["finish_reason"] for each in choices if each["index"] == index] for index in range(4)]
        assert [each[-1] for each in reasons] == ["stop", "stop", "length", "length"]
        assert all(reason is None for each in reasons for reason in each[:-1])
        if path == "/v1/chat/completions":
            assert sorted(each["index"] for each in choices if "role" in each["delta"]) == [0, 1, 2, 3]
    else:
        choices = response.json()["choices"]
        assert [each["index"] for each in choices] == [0, 1, 2, 3]
        assert [each["finish_reason"] for each in choices] == ["stop", "stop", "length", "length"]
        texts = [text_of(each) for each in choices]
    assert texts == ["", "a", "ab", "ab"]


@each_path
def test_usage_counts_the_prompt_once_and_the_tokens_of_every_choice(path):
    body = {**PATHS[path], "max_tokens": 5, "ignore_eos": True}
    one, three = (ask(make_engine(), path, {**body, "n": n}).json()["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 15
    assert three["total_tokens"] == three["prompt_tokens"] + 15


def test_each_prompt_of_a_list_has_its_choices_side_by_side():
    script = {f"cmpl-0-{index}": ids(f"{index}") for index in range(4)}
    body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 1, "echo": True}
    answer = ask(make_engine(script=script), "/v1/completions", body).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [
        (0, "ab0"), (1, "ab1"), (2, "cde2"), (3, "cde3"),
    ]  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@each_path
def test_choice_i_has_the_seed_that_is_i_further(path):
    engine = make_engine()
    ask(engine, path, {**PATHS[path], "n": 3, "seed": 2**64 - 2, "max_tokens": 1})
    assert [admission.seed for _, _, admission in engine.runner.admissions] == [2**64 - 2, 2**64 - 1, 0]


def test_choices_without_a_seed_differ_in_theirs():
    engine = make_engine()
    ask(engine, "/v1/completions", {"prompt": "hi", "n": 3, "max_tokens": 1})
    assert len({admission.seed for _, _, admission in engine.runner.admissions}) == 3


@pytest.mark.parametrize("n", [4, 5, 9])
def test_more_choices_than_slots_run_in_waves(n):
    engine = make_engine(max_num_seqs=4)
    body = {"prompt": "hi", "n": n, "max_tokens": 3, "ignore_eos": True}
    answer = ask(engine, "/v1/completions", body).json()
    assert [len(each["text"]) for each in answer["choices"]] == [3] * n
    working = [output for output in engine.runner.outputs if output.scheduled]
    assert len(working) == 3 * -(-n // 4)
    assert max(len(output.scheduled) for output in working) == min(n, 4)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_choices_that_preempt_each_other_keep_their_text_and_index():
    script = {f"cmpl-0-{index}": ids("xyz"[index] * 20) for index in range(3)}
    engine = make_engine(num_blocks=11, script=script)
    answer = ask(engine, "/v1/completions", {"prompt": "hi", "n": 3, "max_tokens": 20}).json()
    assert [each["text"] for each in answer["choices"]] == ["x" * 20, "y" * 20, "z" * 20]
    assert engine.scheduler.counters.preemptions > 0


def test_more_choices_in_all_than_one_answer_may_have_are_refused_with_both_numbers():
    response = ask(make_engine(), "/v1/completions", {"prompt": ["a"] * 513, "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert all(number in response.json()["error"]["message"] for number in ("513", "2", "1024"))


@each_path
def test_a_client_that_hangs_up_ends_all_of_its_choices(path):
    engine = make_engine(wrap=GatedRunner)

    async def test():
        async with started(engine) as (async_engine, _):
            body = {**PATHS[path], "n": 3, "max_tokens": 100, "ignore_eos": True, "stream": True}
            client = HandDriven(app_over(engine, async_engine), path, body)
            engine.runner.let_through(2)
            await engine.runner.wait_until_entered(3)
            await client.hang_up()
            engine.runner.open_for_good()
            while engine.has_unfinished:
                await asyncio.sleep(0)

    run(test())
    assert all(steps_of(engine.runner.inner, f"{STEMS[path]}-{index}") <= 4 for index in range(3))
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


@each_path
@pytest.mark.parametrize("n", [1, 2])
def test_the_usage_so_far_is_on_every_chunk_where_it_is_asked_for(path, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**PATHS[path], "n": n, "max_tokens": 3, "ignore_eos": True, "stream": True, "stream_options": options}
    chunks = chunks_of(ask(make_engine(), path, body))
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert so_far == sorted(so_far)
    assert (so_far[0], so_far[-1]) == (1, 3 * n)
    assert len(set(so_far)) == 3 * n
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []


def test_the_usage_so_far_needs_the_usage():
    body = {"prompt": "hi", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    response = ask(make_engine(), "/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options.continuous_usage_stats"
