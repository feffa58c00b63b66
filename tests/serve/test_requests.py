from __future__ import annotations

import asyncio
import json
import logging

import pytest

from millpond.config import LoadLimits
from tiny_engine import FakeClock, GatedRunner, make_engine, run
from tiny_server import NOW, started

BODY = {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 4, "ignore_eos": True}


def post(client, header=None, path="/v1/completions", **fields):
    headers = {} if header is None else {"X-Request-Id": header}
    return asyncio.create_task(client.post(path, json={**BODY, **fields}, headers=headers))


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def at_step(async_engine, number):
    """The engine is in a step, and so many are over."""
    runner = async_engine._engine.runner
    for _ in range(number):
        runner.let_through(1)
        await runner.wait_until_entered()
    await until(lambda: async_engine.last_step is not None and async_engine.last_step.step == number - 1)


def with_requests(test, engine=None, **settings):
    engine = engine or make_engine(wrap=GatedRunner, max_num_seqs=1, prefix_cache=False)

    async def around():
        async with started(engine, **settings) as (async_engine, client):
            try:
                return await test(async_engine, client)
            finally:
                engine.runner.open_for_good()

    return run(around())


async def got(client, name, **headers):
    response = await client.get(f"/v1/requests/{name}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_request_that_waits_says_why_and_how_long_it_did_afterwards():
    async def test(async_engine, client):
        tasks = [post(client, name) for name in ("first", "second", "third")]
        await until(lambda: async_engine.num_unfinished == 3)
        await async_engine._engine.runner.wait_until_entered()
        await at_step(async_engine, 2)
        during = [await got(client, name) for name in ("first", "second", "third")]
        async_engine._engine.runner.open_for_good()
        await asyncio.gather(*tasks)
        return during, await got(client, "second")

    (first, second, third), after = with_requests(test)
    [first], [second], [third] = (each["requests"] for each in (first, second, third))
    assert (first["state"], first["waiting_for"], first["output_tokens"], first["computed_tokens"]) == (
        *("running", None),
        *(2, 7),
    )
    assert (second["state"], second["waiting_for"]) == ("waiting", "needs a slot; 0 of 1 are free")
    assert (third["state"], third["waiting_for"]) == ("waiting", "behind 1 other")
    last = second["entries"][-1]
    assert {name: last[name] for name in ("event", "on", "need", "free", "total", "text")} == {
        "event": "blocked",
        "on": "slots",
        "need": 1,
        "free": 0,
        "total": 1,
        "text": "needs a slot; 0 of 1 are free",
    }
    assert last["last_step"] > last["step"]
    assert last["last_seconds"] > last["seconds"]
    [after] = after["requests"]
    assert (after["state"], after["finish_reason"], after["waiting_for"]) == ("finished", "length", None)
    expected = ["queued", "blocked", "admitted", "computed", "first_token", "finished"]
    assert [each["event"] for each in after["entries"]] == expected
    assert after["summary"]["blocked_seconds"].keys() == {"slots"}
    assert after["summary"]["text"].startswith("queued ")
    assert after["entries_left_out"] == 0
    assert after["created"] == pytest.approx(NOW, abs=60.0)


def test_a_request_that_the_engine_has_not_seen_is_queued_behind_those_that_wait():
    async def test(async_engine, client):
        tasks = [post(client, "first")]
        await async_engine._engine.runner.wait_until_entered()
        tasks.append(post(client, "second"))
        await until(lambda: async_engine.num_unfinished == 2)
        [unseen] = (await got(client, "second"))["requests"]
        listed = (await client.get("/v1/requests")).json()
        async_engine._engine.runner.open_for_good()
        await asyncio.gather(*tasks)
        return unseen, listed

    unseen, listed = with_requests(test)
    assert (unseen["state"], unseen["waiting_for"], unseen["entries"]) == ("queued", "the next step", [])
    assert (unseen["prompt_tokens"], unseen["max_tokens"], unseen["finish_reason"]) == (6, None, None)
    assert [row["state"] for row in listed["data"]] == ["running", "queued"]


def test_the_list_has_the_pool_and_those_that_run_before_those_that_wait():
    async def test(async_engine, client):
        tasks = [post(client, "first", max_tokens=1)]
        await async_engine._engine.runner.wait_until_entered()
        tasks += [post(client, name, max_tokens=10) for name in "abcd"]  # which are all there at step 1
        await until(lambda: async_engine.num_unfinished == 5)
        await at_step(async_engine, 5)
        listed = [(await client.get(f"/v1/requests{query}")).json() for query in ("", "?limit=2")]
        waiting = async_engine._engine.scheduler.waiting
        waiting.move_to_end(list(waiting)[-1], last=False)  # as a policy might have it
        turned = (await client.get("/v1/requests")).json()["data"]
        waiting.move_to_end(next(iter(waiting)))
        assert [row["id"].split("-")[1] for row in turned] == ["a", "b", "d", "c"]
        bad = [await client.get(f"/v1/requests?limit={limit}") for limit in ("0", "2001", "x")]
        async_engine._engine.runner.open_for_good()
        await asyncio.gather(*tasks)
        return listed, bad, (await client.get("/v1/requests")).json()

    engine = make_engine(wrap=GatedRunner, num_blocks=8, max_num_seqs=3, prefix_cache=False, watermark_blocks=1)
    (whole, few), bad, idle = with_requests(test, engine)
    assert whole["slots"] == {"total": 3, "free": 1}
    assert whole["blocks"] == {"total": 8, "free": 2, "held_back": 1, "size": 4}
    assert (whole["running"], whole["waiting"], whole["unfinished"]) == (2, 2, 4)
    assert whole["head_waits_for"] == "needs 3 blocks; 2 of 8 are free, 1 of them held back from newcomers"
    assert [row["state"] for row in whole["data"]] == ["running", "running", "waiting", "waiting"]
    assert [row["waiting_for"] for row in whole["data"]] == [None, None, whole["head_waits_for"], "behind 1 other"]
    assert [row["id"] for row in few["data"]] == [row["id"] for row in whole["data"][:2]]
    assert few["unfinished"] == 4
    for response in bad:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")
    assert (idle["data"], idle["head_waits_for"], idle["running"], idle["generated_tokens"]) == ([], None, 0, 41)


def test_the_head_is_whom_the_policy_names_and_not_the_first_of_the_first_line():
    async def test(async_engine, client):
        tasks = []
        for name, user in (("first", "a"), ("second", "a"), ("third", "b")):
            tasks.append(post(client, name, user=user, max_tokens=10))
            await until(lambda: async_engine.num_unfinished == len(tasks))
        await async_engine._engine.runner.wait_until_entered()
        await at_step(async_engine, 3)
        listed = (await client.get("/v1/requests")).json()
        async_engine._engine.runner.open_for_good()
        await asyncio.gather(*tasks)
        return listed

    engine = make_engine(wrap=GatedRunner, max_num_seqs=1, prefix_cache=False, policy="fair")
    listed = with_requests(test, engine)
    assert listed["waiting"] == 2
    assert listed["head_waits_for"] == "needs a slot; 0 of 1 are free"


def test_a_request_is_found_by_its_header_by_its_answers_id_and_choice_by_choice():
    async def test(async_engine, client):
        async_engine._engine.runner.open_for_good()
        answer = await post(client, "mine", n=2, prompt=["ab", "cd"])
        chat = await post(
            client, path="/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], prompt=None
        )
        found = {
            name: [each["id"] for each in (await got(client, name))["requests"]]
            for name in ("mine", answer.json()["id"], f"{answer.json()['id']}-2")
        }
        chat_found = [await got(client, name) for name in (chat.json()["id"], chat.headers["x-request-id"])]
        return answer.json()["id"], found, chat.json()["id"], chat_found

    answer_id, found, chat_id, chat_found = with_requests(test)
    choices = [f"{answer_id}-{index}" for index in range(4)]
    assert found == {"mine": choices, answer_id: choices, f"{answer_id}-2": choices[2:3]}
    assert [[each["id"] for each in one["requests"]] for one in chat_found] == [[chat_id]] * 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_the_other_shapes_answers_are_found_as_well(path, fields):
    async def test(async_engine, client):
        async_engine._engine.runner.open_for_good()
        response = await client.post(path, json=fields)
        return response, await got(client, response.json()["id"]), await got(client, response.headers["x-request-id"])

    response, by_id, by_header = with_requests(test)
    assert by_id["requests"] == by_header["requests"]
    assert by_id["requests"][0]["id"] == response.json()["id"]


@pytest.mark.parametrize("name", ["nothing", "x" * 5000, "a%0ab"])
def test_what_is_not_there_is_a_404_that_says_how_many_are_kept(name):
    async def test(async_engine, client):
        return await client.get(f"/v1/requests/{name}")

    response = with_requests(test)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("request_not_found", "request_id")
    assert "the last 1000 that have ended" in error["message"]
    assert len(response.content) < 1000


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_a_key_sees_its_own_requests_and_of_the_others_how_many_there_are():
    async def test(async_engine, client):
        tasks = []
        for key, name, prompt in (("one", "mine", "12"), ("two", "theirs", "34")):
            headers = {**bearer(key), "X-Request-Id": name}
            body = {**BODY, "prompt": prompt * 4, "max_tokens": 12}
            tasks.append(asyncio.create_task(client.post("/v1/completions", json=body, headers=headers)))
            await until(lambda: async_engine.num_unfinished == len(tasks))
        await until(lambda: async_engine.num_unfinished == 2)
        await async_engine._engine.runner.wait_until_entered()
        await at_step(async_engine, 6)
        keys, names = ("one", "two"), ("mine", "theirs")
        answers = {
            (k, name): await client.get(f"/v1/requests/{name}", headers=bearer(k)) for k in keys for name in names
        }
        listed = [(await client.get("/v1/requests", headers=bearer(key))).json() for key in keys]
        without = [(await client.get(path)).status_code for path in ("/v1/requests", "/v1/requests/mine")]
        async_engine._engine.runner.open_for_good()
        await asyncio.gather(*tasks)
        return answers, listed, without

    engine = make_engine(wrap=GatedRunner, num_blocks=6, max_num_seqs=2, prefix_cache=False)
    answers, listed, without = with_requests(test, engine, api_keys=("one", "two"))
    assert without == [401, 401]
    statuses = {both: response.status_code for both, response in answers.items()}
    assert statuses == {("one", "mine"): 200, ("one", "theirs"): 404, ("two", "mine"): 404, ("two", "theirs"): 200}
    assert [[row["id"].split("-")[1] for row in each["data"]] for each in listed] == [["mine"], ["theirs"]]
    assert [(each["running"], each["waiting"], each["unfinished"]) for each in listed] == [(1, 1, 1)] * 2
    entries = answers["two", "theirs"].json()["requests"][0]["entries"]
    [preempted] = [each for each in entries if each["event"] == "preempted"]
    assert preempted["by"] == "another key's request"
    assert "mine" not in answers["two", "theirs"].text


def test_without_keys_the_one_that_preempted_is_named():
    async def test(async_engine, client):
        tasks = [post(client, name, prompt=prompt * 4, max_tokens=12) for name, prompt in (("a", "12"), ("b", "34"))]
        await until(lambda: async_engine.num_unfinished == 2)
        async_engine._engine.runner.open_for_good()
        await asyncio.gather(*tasks)
        return await got(client, "b")

    engine = make_engine(wrap=GatedRunner, num_blocks=6, max_num_seqs=2, prefix_cache=False)
    entries = with_requests(test, engine)["requests"][0]["entries"]
    [preempted] = [each for each in entries if each["event"] == "preempted"]
    assert preempted["by"].startswith("cmpl-a-")
    lost = preempted["blocks"], preempted["computed_tokens"]
    assert preempted["text"] == f"lost {lost[0]} blocks and {lost[1]} computed tokens to {preempted['by']}"


def access_lines(caplog):
    return [record for record in caplog.records if record.name == "millpond.access" and record.args[0] == "POST"]


def slow(caplog, clock=None, **settings):
    """The access lines of two requests for one slot."""

    async def test(async_engine, client):
        tasks = [post(client, name, n=2) for name in ("first", "second")]
        await until(lambda: async_engine.num_unfinished == 4)
        async_engine._engine.runner.open_for_good()
        await asyncio.gather(*tasks)
        await client.post("/tokenize", json={"prompt": "hi"})

    caplog.set_level(logging.INFO)
    with_requests(test, **settings)
    return access_lines(caplog)


def test_the_line_of_a_slow_request_says_what_it_waited_for_and_others_do_not(caplog):
    first, second, tokenize = slow(caplog, slow_request=0.0)
    for record in (first, second):
        assert record.getMessage().split(" s: ")[1].startswith("queued ")
        assert record.fields["blocked_seconds"].keys() == {"slots"}
        assert (record.fields["preemptions"], record.fields["recomputed_tokens"]) == (0, 0)
        assert record.fields["waiting_seconds"] >= record.fields["blocked_seconds"]["slots"] > 0
    assert "blocked on slots" in second.getMessage()
    assert "queued" not in tokenize.getMessage()
    assert "waiting_seconds" not in tokenize.fields


def test_a_request_that_is_not_slow_has_the_line_it_had(caplog):
    for record in slow(caplog, slow_request=1000.0):
        assert record.getMessage().endswith(" s")
        assert "waiting_seconds" not in record.fields


def test_the_line_of_a_request_that_ran_out_of_time_says_what_kept_it(caplog):
    clock = FakeClock()

    async def test(async_engine, client):
        tasks = [post(client, "first"), post(client, "second")]
        await until(lambda: async_engine.num_unfinished == 2)
        await async_engine._engine.runner.wait_until_entered()
        await at_step(async_engine, 1)
        clock.now += 5.0
        async_engine.end_overdue()
        assert (await tasks[1]).status_code == 504
        async_engine._engine.runner.open_for_good()
        assert (await tasks[0]).status_code == 200
        await until(lambda: async_engine.timelines.unfinished == [])
        return await got(client, "second")

    caplog.set_level(logging.INFO)
    found = with_requests(test, load=LoadLimits(queue_timeout=5.0), clock=clock, slow_request=0.0)
    late = next(record for record in access_lines(caplog) if " 504 in " in record.getMessage())
    assert "blocked on slots" in late.getMessage()
    [timeline] = found["requests"]
    last = timeline["entries"][-1]
    assert (last["event"], last["reason"], last["cause"]) == ("finished", "abort", "queue_timeout")
    assert last["text"] == "abort after 0 tokens: queue_timeout"


def test_no_word_of_a_prompt_or_an_answer_is_in_a_timeline():
    async def test(async_engine, client):
        async_engine._engine.runner.open_for_good()
        response = await post(client, "mine", prompt="the secret", logit_bias={"5": 1})
        return response.json()["choices"][0]["text"], await got(client, "mine")

    text, found = with_requests(test)
    assert len(text) == 4
    assert "secret" not in json.dumps(found)
    assert text not in json.dumps(found)
