"""Priorities, tenants and deadlines over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from millpond.core.fair_shares import Fair
from millpond.serve.tenants import TENANT_HEADER
from tiny_engine import FakeClock, GatedRunner, make_engine, run, steps_of
from tiny_server import ask, started, turned_away, until, with_gate

PATH = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
LONG = {"prompt": "hi", "max_tokens": 40, "ignore_eos": True}
SHAPES = [
    (PATH, BODY),
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 3}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
]


def order_of(engine):
    """Who was admitted, in order."""
    return [name for output in engine.runner.inner.outputs for name in output.admitted]


@pytest.mark.parametrize(("path", "body"), SHAPES)
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_priority_that_would_change_nothing_is_refused_by_name_and_0_is_not(path, body, policy):
    response = ask(make_engine(policy=policy), path, {**body, "priority": 1})
    assert response.status_code == 400
    assert "priority 1 would change nothing" in response.text
    assert policy in response.text
    assert ask(make_engine(policy=policy), path, {**body, "priority": 0}).status_code == 200


@pytest.mark.parametrize(("path", "body"), SHAPES)
@pytest.mark.parametrize("priority", [-1001, 1001])
def test_a_priority_out_of_bounds_is_refused_with_both_numbers(path, body, priority):
    response = ask(make_engine(policy="priority"), path, {**body, "priority": priority})
    assert response.status_code == 400
    assert f"priority must be from -1000 to 1000, got {priority}" in response.text


@pytest.mark.parametrize("deadline_ms", [0, -5, 86_400_001])
def test_a_deadline_out_of_bounds_is_refused_with_both_numbers(deadline_ms):
    response = ask(make_engine(), PATH, {**BODY, "deadline_ms": deadline_ms})
    assert response.status_code == 400
    assert (
        f"deadline_ms must be from 1 to 86400000 milliseconds, got {deadline_ms}" in response.json()["error"]["message"]
    )
    assert response.json()["error"]["param"] == "deadline_ms"


def test_a_smaller_priority_takes_the_slot_and_both_get_the_answers_they_get_alone():
    alone = ask(make_engine(), PATH, LONG).json()["choices"]

    async def test(client, async_engine, runner):
        low = asyncio.create_task(client.post(PATH, json={**LONG, "priority": 5}))
        runner.let_through(3)
        await runner.wait_until_entered(4)
        high = asyncio.create_task(client.post(PATH, json={**LONG, "priority": -5}))
        await until(lambda: async_engine.num_unfinished == 2)
        runner.open_for_good()
        assert (await high).json()["choices"] == alone
        assert (await low).json()["choices"] == alone
        metrics = (await client.get("/metrics")).text
        assert 'millpond_displaced_total{model_name="tiny"} 1.0' in metrics

    engine = with_gate(test, policy="priority", max_num_seqs=1)
    assert order_of(engine) == ["cmpl-0-0", "cmpl-1-0", "cmpl-0-0"]


@pytest.mark.parametrize(
    ("who", "count"), [pytest.param("user", 1000, marks=pytest.mark.slow), ("header", 200), ("key", 200)]
)
def test_a_flood_of_one_tenant_delays_anothers_request_by_no_step(who, count):
    """The single one is admitted in the first step after it came, and has a token in each from then on."""

    def asking(name):
        headers = {"header": {TENANT_HEADER: name}, "key": {"Authorization": f"Bearer {name}"}}.get(who, {})
        return {"json": {**BODY, **({"user": name} if who == "user" else {})}, "headers": headers}

    keys = {"api_keys": ("flood", "other")} if who == "key" else {}
    arrived = {}  # the number of the step after which each came

    async def flooded():
        engine = make_engine(policy="fair", num_blocks=64, audit=count < 1000, wrap=GatedRunner)
        enter, runner = engine.scheduler.policy.enter, engine.runner

        def note(request, step):
            arrived[request.request_id] = step
            enter(request, step)

        engine.scheduler.policy.enter = note
        async with started(engine, **keys) as (async_engine, client):
            tasks = [asyncio.create_task(client.post(PATH, **asking("flood"))) for _ in range(count)]
            await until(lambda: async_engine.num_unfinished == count)
            runner.let_through(4)
            await runner.wait_until_entered(5)
            single = asyncio.create_task(client.post(PATH, **asking("other")))
            await until(lambda: async_engine.num_unfinished == count + 1 - sum(task.done() for task in tasks))
            runner.open_for_good()
            assert {answer.status_code for answer in await asyncio.gather(single, *tasks)} == {200}
        return engine

    engine = run(flooded())
    single = f"cmpl-{count}-0"  # the last that came
    steps = [
        output for output in engine.runner.inner.outputs if single in [each.request_id for each in output.scheduled]
    ]
    assert single in steps[0].admitted
    assert steps[0].step == arrived[single]
    assert [output.step - arrived[single] for output in steps] == [0, 1, 2]


def tenants_seen(policy="fair", headers=(), body=None, **settings):
    """Whose the scheduler took a request to be."""
    engine, seen = make_engine(policy=policy), []
    add = engine.scheduler.add_request
    engine.scheduler.add_request = lambda request: (seen.append(request.tenant), add(request))

    async def once():
        async with started(engine, **settings) as (_, client):
            return await client.post(PATH, json={**BODY, **(body or {})}, headers=list(headers))

    return run(once()), seen


KEY = ("Authorization", "Bearer second")
HEADER = (TENANT_HEADER, "team")


@pytest.mark.parametrize(
    ("headers", "body", "settings", "tenant"),
    [
        ([KEY, HEADER], {"user": "ann"}, {"api_keys": ("first", "second")}, "key2"),
        ([KEY, HEADER], {"user": "ann"}, {}, "user:ann"),  # a key that nobody asked for says nothing
        ([HEADER], {}, {}, "header:team"),
        ([], {}, {}, ""),
        ([], {"user": ""}, {}, ""),
    ],
)
def test_a_known_key_wins_over_the_body_and_that_over_the_header(headers, body, settings, tenant):
    response, seen = tenants_seen(headers=headers, body=body, **settings)
    assert response.status_code == 200
    assert seen == [tenant]


def test_where_the_policy_is_not_fair_nobody_is_a_tenant():
    assert tenants_seen("fcfs", [HEADER], {"user": "ann"})[1] == [""]


@pytest.mark.parametrize("headers", [[HEADER, HEADER], [(TENANT_HEADER, "a b")], [(TENANT_HEADER, "x" * 201)]])
def test_a_header_that_is_no_name_is_refused_by_name(headers):
    response, seen = tenants_seen(headers=headers)
    assert (response.status_code, seen) == (400, [])
    assert response.json()["error"]["param"] == TENANT_HEADER


def test_the_policy_of_the_engine_is_that_of_its_config():
    assert isinstance(make_engine(policy="fair").scheduler.policy, Fair)


class TestDeadlines:
    def test_before_anything_was_measured_nothing_is_refused_for_its_deadline(self):
        response = ask(make_engine(), PATH, {**BODY, "deadline_ms": 60_000})
        assert response.status_code == 200

    def test_an_answer_that_may_end_early_is_taken_to_be_as_long_as_those_of_late(self):
        async def test(client, async_engine, runner):
            runner.open_for_good()
            early = {**BODY, "max_tokens": 50, "ignore_eos": False, "deadline_ms": 7000}
            prices = async_engine._engine.prices
            prices.note(1, 0, 4.0)
            prices.note = lambda *step: None
            assert (await client.post(PATH, json={**early, "max_tokens": 1})).status_code == 200
            assert (await client.post(PATH, json=LONG)).status_code == 200
            error = (await client.post(PATH, json=early)).json()["error"]
            assert "an answer of about 40 tokens 156000" in error["message"]

        with_gate(test)

    def test_the_refusal_names_the_parts_of_the_estimate_and_is_counted(self):
        async def test(client, async_engine, runner):
            runner.open_for_good()
            async_engine._engine.prices.note(1, 0, 4.0)  # a row costs a second, beside the three of every step
            response = await client.post(PATH, json={**BODY, "deadline_ms": 7999})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (503, "deadline_unreachable", "deadline_ms")
            assert (
                "within deadline_ms 7999: by what was measured it takes 8000 ms, of which it waits 0"
                in error["message"]
            )
            assert "an answer of about 3 tokens 8000" in error["message"]
            assert turned_away(async_engine) == {"deadline_unreachable": 1}
            assert async_engine.num_unfinished == 0
            assert (await client.post(PATH, json={**BODY, "deadline_ms": 8000})).status_code == 200

        with_gate(test)

    def test_what_expires_in_the_queue_is_a_504_and_never_costs_a_step(self):
        clock = FakeClock()

        async def test(client, async_engine, runner):
            first = asyncio.create_task(client.post(PATH, json=LONG))
            await runner.wait_until_entered()
            late = asyncio.create_task(client.post(PATH, json={**BODY, "deadline_ms": 5000}))
            await until(lambda: async_engine.num_unfinished == 2)
            clock.now += 5.0
            runner.open_for_good()
            response = await late
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_waiting")
            assert response.json()["error"]["message"] == "deadline_ms 5000 has passed before any step had room for it"
            assert turned_away(async_engine) == {"deadline_waiting": 1}
            assert (await first).status_code == 200

        engine = with_gate(test, clock=clock, max_num_seqs=2)
        assert steps_of(engine.runner.inner, "cmpl-1-0") == 0

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_expires_while_it_runs_is_ended_as_a_timeout_ends_it(self, stream):
        clock = FakeClock()

        async def test(client, async_engine, runner):
            body = {**LONG, "deadline_ms": 5000, "stream": stream}
            task = asyncio.create_task(client.post(PATH, json=body))
            runner.let_through(2)
            await runner.wait_until_entered(3)
            await until(lambda: async_engine.num_queued == 0)
            clock.now += 5.0
            async_engine.end_overdue()
            runner.open_for_good()
            response = await task
            text = response.text
            assert response.status_code == (200 if stream else 504)
            assert "deadline_ms 5000 has passed before the answer was complete" in text
            assert turned_away(async_engine) == {"deadline_running": 1}

        with_gate(test, clock=clock)
