"""More than the server takes on: overload, timeouts, a stuck step, slow readers and busy templates."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import datetime
from types import SimpleNamespace

import pytest

from async_helpers import as_the_loop_turns
from millpond.config import LoadLimits
from millpond.serve.sse import EventStream
from millpond.text.chat import ChatTemplate
from tiny_engine import BOUND_SECONDS, FakeClock, ids, make_engine, run, steps_of, tokenizer_with
from tiny_server import HandDriven, app_over, ask, events_of, named_events_of, started, turned_away, until, with_gate

PATH = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
OTHER_SHAPES = [
    ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 50}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 50}),
]


@pytest.mark.parametrize("stream", [False, True])
def test_beyond_the_bound_a_request_is_a_429_with_retry_after_and_below_it_is_answered(stream):
    async def test(client, async_engine, runner):
        body = {**BODY, "stream": stream}
        tasks = [asyncio.create_task(client.post(PATH, json=body)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) + async_engine.num_unfinished == 20)
        refused = [task.result() for task in tasks if task.done()]
        assert len(refused) == 20 - (2 + 5)
        for response in refused:
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            error = response.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("requests", None, "rate_limit_exceeded")
            assert "7 requests wait, of at most 5 beside 2 free slots" in error["message"]
        runner.open_for_good()
        assert sorted([(await task).status_code for task in tasks]) == [200] * 7 + [429] * 13
        assert turned_away(async_engine) == {"waiting_requests": 13}

    with_gate(test, max_num_seqs=2, load=LoadLimits(max_waiting_requests=5))


def test_retry_after_follows_the_speed_at_which_answers_finish():
    clock = FakeClock()

    async def test(client, async_engine, runner):
        first = [asyncio.create_task(client.post(PATH, json={**BODY, "max_tokens": 1})) for _ in range(2)]
        await until(lambda: async_engine.num_unfinished == 2)
        runner.let_through(1)
        await first[0]
        clock.now += 8.0
        runner.let_through(1)
        await first[1]
        # Two answers in 8 seconds, after the work began anew with the next: nothing has finished in 11.
        tasks = [asyncio.create_task(client.post(PATH, json=BODY)) for _ in range(2)]
        await until(lambda: async_engine.num_unfinished == 2)
        clock.now += 10.5
        assert (await client.post(PATH, json=BODY)).headers["retry-after"] == "11"
        runner.open_for_good()
        await asyncio.gather(*tasks)

    with_gate(test, max_num_seqs=1, load=LoadLimits(max_waiting_requests=1), clock=clock)


@pytest.mark.parametrize(
    ("path", "body"), [(PATH, {**BODY, "prompt": "a" * 40}), ("/v1/chat/completions", CHAT), *OTHER_SHAPES]
)
def test_a_full_queue_of_prompt_tokens_refuses_before_any_text_is_rendered_or_tokenized(path, body, monkeypatch):
    async def test(client, async_engine, runner):
        running = asyncio.create_task(client.post(PATH, json=BODY))
        runner.let_through(1)
        await runner.wait_until_entered(2)
        waiting = asyncio.create_task(client.post(PATH, json={**BODY, "prompt": ids("a" * 20)}))
        await until(lambda: async_engine.num_queued == 1)
        monkeypatch.setattr(type(async_engine._engine.tokenizer), "encode", lambda *a, **b: pytest.fail("tokenized"))
        monkeypatch.setattr(type(async_engine._engine.chat_template), "render", lambda *a, **b: pytest.fail("rendered"))
        response = await client.post(path, json=body)
        assert response.status_code == 429, response.text
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == ("rate_limit_error" if path == "/v1/messages" else "tokens")
        assert "20 tokens wait, of at most 20" in response.json()["error"]["message"]
        assert turned_away(async_engine) == {"waiting_tokens": 1}
        runner.open_for_good()
        assert (await running).status_code == (await waiting).status_code == 200

    engine = make_engine(max_num_seqs=1)
    longest = max(map(len, engine.tokenizer.vocabulary.tokens))
    assert 40 // longest >= 1
    with_gate(test, max_num_seqs=1, load=LoadLimits(max_waiting_tokens=20))


def test_the_exact_count_refuses_what_the_cheap_bound_let_through():
    async def test(client, async_engine, runner):
        running = asyncio.create_task(client.post(PATH, json=BODY))
        runner.let_through(1)
        await runner.wait_until_entered(2)
        waiting = asyncio.create_task(client.post(PATH, json={**BODY, "prompt": ids("a" * 18)}))
        await until(lambda: async_engine.num_queued == 1)
        text = "xyzw"  # four tokens, and at the least one
        response = await client.post(PATH, json={**BODY, "prompt": text})
        assert (response.status_code, response.json()["error"]["type"]) == (429, "tokens")
        runner.open_for_good()
        await asyncio.gather(running, waiting)

    with_gate(test, max_num_seqs=1, load=LoadLimits(max_waiting_tokens=20))


def test_a_list_of_prompts_is_all_in_or_all_out():
    async def test(client, async_engine, runner):
        running = asyncio.create_task(client.post(PATH, json={**BODY, "prompt": ["a", "b"]}))
        await runner.wait_until_entered()
        assert async_engine.num_unfinished == 2
        response = await client.post(PATH, json={**BODY, "prompt": ["a", "b", "c"]})
        assert response.status_code == 429
        assert "this one" not in response.json()["error"]["message"]
        assert async_engine.num_unfinished == 2
        runner.open_for_good()
        assert (await running).status_code == 200

    engine = with_gate(test, max_num_seqs=2, load=LoadLimits(max_waiting_requests=2))
    assert {each.request_id for plan in engine.runner.inner.outputs for each in plan.scheduled} == {
        "cmpl-0-0",
        "cmpl-0-1",
    }


def test_a_list_that_no_empty_queue_could_take_is_a_400_that_names_the_prompt():
    async def test(client, async_engine, runner):
        response = await client.post(PATH, json={**BODY, "prompt": ["a"] * 5})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        assert "5 requests" in response.json()["error"]["message"]

    with_gate(test, max_num_seqs=2, load=LoadLimits(max_waiting_requests=2))


@pytest.mark.parametrize(("path", "body"), [(PATH, BODY), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_request_whose_time_is_over_is_a_504_or_an_error_event_in_words(path, body, stream, own):
    clock = FakeClock()

    async def test(client, async_engine, runner):
        timeout = {"timeout": 7} if own else {}
        task = asyncio.create_task(client.post(path, json={**body, **timeout, "max_tokens": 50, "stream": stream}))
        runner.let_through(1)
        await runner.wait_until_entered(2)
        clock.now += 7.5
        async_engine.end_overdue()
        response = await task
        if stream:
            *events, last = events_of(response)
            assert len(events) >= 1
            error = json.loads(last)["error"]
        else:
            assert response.status_code == 504
            error = response.json()["error"]
        assert error["code"] == "request_timeout"
        assert turned_away(async_engine) == {"request_timeout": 1}
        assert "longer than its limit of 7 s" in error["message"]

    engine = with_gate(test, load=LoadLimits(request_timeout=None if own else 7.0), clock=clock)
    assert len(engine.runner.inner.outputs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_is_a_504_or_an_error_event(stream):
    clock = FakeClock()

    async def test(client, async_engine, runner):
        running = asyncio.create_task(client.post(PATH, json=BODY))
        await runner.wait_until_entered()
        late = asyncio.create_task(client.post(PATH, json={**BODY, "stream": stream}))
        await until(lambda: async_engine.num_queued == 2)
        runner.let_through(1)
        await runner.wait_until_entered()
        clock.now += 3.0
        async_engine.end_overdue()
        response = await late
        error = json.loads(events_of(response)[-1])["error"] if stream else response.json()["error"]
        assert error["code"] == "queue_timeout"
        assert turned_away(async_engine) == {"queue_timeout": 1}
        assert response.status_code == (200 if stream else 504)
        runner.open_for_good()
        assert (await running).status_code == 200

    engine = with_gate(test, max_num_seqs=1, load=LoadLimits(queue_timeout=3.0), clock=clock)
    assert steps_of(engine.runner.inner, "cmpl-1-0") == 0


@pytest.mark.parametrize(("path", "body"), OTHER_SHAPES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_is_over_says_so_in_every_shape(path, body, stream):
    clock = FakeClock()

    async def test(client, async_engine, runner):
        task = asyncio.create_task(client.post(path, json={**body, "timeout": 7, "stream": stream}))
        runner.let_through(1)
        await runner.wait_until_entered(2)
        clock.now += 7.5
        async_engine.end_overdue()
        response = await task
        assert response.status_code == (200 if stream else 504)
        last = named_events_of(response)[-1] if stream else response.json()
        error = last["response"]["error"] if last.get("type") == "response.failed" else last["error"]
        assert "longer than its limit of 7 s" in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "timeout_error"

    engine = with_gate(test, clock=clock)
    assert len(engine.runner.inner.outputs) == 2


@pytest.mark.parametrize("timeout", [0, -1, "5", True, 61])
@pytest.mark.parametrize(("path", "body"), [(PATH, BODY), ("/v1/chat/completions", CHAT)])
def test_a_timeout_that_cannot_be_is_a_400_that_names_it(path, body, timeout):
    response = ask(make_engine(), path, {**body, "timeout": timeout}, load=LoadLimits(request_timeout=60.0))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout"


def test_health_is_503_with_the_reason_while_a_step_is_stuck_and_200_when_it_moves_on():
    clock = FakeClock()

    async def test(client, async_engine, runner):
        task = asyncio.create_task(client.post(PATH, json=BODY))
        await runner.wait_until_entered()
        assert (await client.get("/health")).status_code == 200
        clock.now += 5.5
        sick = await client.get("/health")
        assert sick.status_code == 503
        assert "stuck" in sick.json()["reason"]
        assert "more than 5 s" in sick.json()["reason"]
        runner.open_for_good()
        assert (await task).status_code == 200
        assert (await client.get("/health")).json()["status"] == "ok"

    with_gate(test, load=LoadLimits(stuck_after=5.0), clock=clock)


def test_health_says_what_the_engine_died_of(caplog):
    async def test():
        async with started(make_engine(raises={0: SystemExit()})) as (_, client):
            assert (await client.post(PATH, json=BODY)).status_code == 503
            return await client.get("/health")

    response = run(test())
    assert response.status_code == 503
    assert "the engine has died: SystemExit" in response.json()["reason"]


@pytest.mark.parametrize(("path", "body"), [(PATH, BODY), ("/v1/chat/completions", CHAT), *OTHER_SHAPES])
def test_a_stream_that_never_begins_leaves_no_place_taken(path, body):
    async def test(client, async_engine, runner):
        app = app_over(async_engine._engine, async_engine, new_id=lambda: "driven")
        driven = HandDriven(app, path, {**body, "stream": True})
        await until(lambda: async_engine.num_unfinished == 1)
        driven.task.cancel()
        await asyncio.wait([driven.task])
        assert (async_engine.num_unfinished, async_engine.num_queued) == (0, 0)

    with_gate(test)


def test_a_stream_that_is_cancelled_before_it_begins_releases_what_it_holds():
    async def test():
        async def events():
            yield b""

        released = []
        stream = EventStream(events(), lambda: released.append(True))
        task = asyncio.create_task(stream({"path": "/"}, asyncio.Event().wait, asyncio.Event().wait))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert released == [True]

    run(test())


class StuckClient(HandDriven):
    """A client that takes the first messages and then no more: send() waits until it reads again."""

    def __init__(self, app, path, body, reads) -> None:
        self.reads_again = asyncio.Event()
        self._reads = reads
        super().__init__(app, path, body)

    async def _send(self, message):
        if self.sent.qsize() >= self._reads:
            await self.reads_again.wait()
        await self.sent.put(message)


def test_a_client_that_stops_reading_is_ended_at_a_bound_and_told_when_it_reads_again(caplog):
    async def test(client, async_engine, runner):
        app = app_over(async_engine._engine, async_engine, new_id=lambda: "driven")
        stuck = StuckClient(app, PATH, {**BODY, "max_tokens": 500, "stream": True}, reads=3)
        await until(lambda: async_engine.num_unfinished == 1)
        steps = asyncio.create_task(as_the_loop_turns(async_engine, runner))
        assert (await client.post(PATH, json={**BODY, "max_tokens": 40})).status_code == 200
        await steps
        assert "has left" in caplog.text
        stuck.reads_again.set()
        await stuck.task
        messages = [stuck.sent.get_nowait() for _ in range(stuck.sent.qsize())]
        assert b'"slow_reader"' in messages[-1]["body"]
        assert len(messages) < 100
        assert turned_away(async_engine) == {"slow_reader": 1}

    engine = with_gate(test, load=LoadLimits(max_unread_outputs=20), num_blocks=600, max_model_len=2000, max_num_seqs=2)
    assert steps_of(engine.runner.inner, "cmpl-driven-0") < 500


NESTED = "{% for message in messages %}{% for letter in message['content'] %}{{ letter }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "is_inline"),
    [("{% for message in messages %}{{ message['content'] }}{% endfor %}", True), (NESTED, False)],
)
def test_a_template_that_is_not_known_to_be_cheap_never_runs_on_the_event_loop(template, is_inline, monkeypatch):
    engine = make_engine(tokenizer=tokenizer_with(chat_template=template))
    threads, original = [], type(engine.chat_template).render

    def recorded(*args, **settings):
        threads.append(threading.current_thread())
        return original(*args, **settings)

    monkeypatch.setattr(type(engine.chat_template), "render", recorded)
    assert ask(engine, "/v1/chat/completions", CHAT).status_code == 200
    assert (threads[0] is threading.main_thread()) == is_inline


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {**CHAT, "timeout": 0.01}), *((path, {**b, "timeout": 0.01}) for path, b in OTHER_SHAPES),
     ("/tokenize", {"messages": CHAT["messages"]})],
)  # fmt: skip
def test_a_template_takes_no_longer_than_a_request_may_and_goes_no_further(path, body):
    moments, may_go_on, has_ended = [], threading.Event(), threading.Event()

    def now():
        moments.append(len(moments))
        has_ended.clear()
        assert may_go_on.wait(BOUND_SECONDS)
        return datetime(2026, 1, 1)

    def render(*args, **kwargs):
        try:
            return template.render(*args, **kwargs)
        finally:
            has_ended.set()

    source = (
        "{% macro m() %}{% endmacro %}{{ strftime_now('%d') }}{% for i in [1] %}{{ strftime_now('%d') }}{% endfor %}"
    )
    template = ChatTemplate(source, {}, now=now)
    engine = make_engine()
    engine.chat_template = SimpleNamespace(render=render, is_cheap=template.is_cheap)

    async def test():
        async with started(engine, load=LoadLimits(request_timeout=0.01)) as (async_engine, client):
            response = await client.post(path, json=body)
            assert turned_away(async_engine) == {"request_timeout": 1}
            may_go_on.set()
            return response

    response = run(test())
    assert response.status_code == 504
    assert "longer than its limit of 0.01 s" in response.json()["error"]["message"]
    assert has_ended.wait(BOUND_SECONDS)
    assert len(moments) <= 1  # none where the time was up before it had begun
