from __future__ import annotations

import asyncio

import pytest

from millpond.engine.async_engine import AsyncEngine
from millpond.serve.disconnect import ClientGone, while_connected
from tiny_engine import GatedRunner, make_engine, run, steps_of
from tiny_server import HandDriven, app_over

COMPLETION = ("/v1/completions", {"prompt": "hi", "max_tokens": 50, "ignore_eos": True})
CHAT = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "ignore_eos": True},
)
# These two take no ignore_eos, but the scripted runner only ever says letters.
MESSAGES = ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50})
RESPONSES = ("/v1/responses", {"input": "hi", "max_output_tokens": 50})
NAMES = {COMPLETION[0]: "cmpl-0-0", CHAT[0]: "chatcmpl-0", MESSAGES[0]: "msg_0", RESPONSES[0]: "resp_0"}


def with_app(test, **settings):
    """Run test(app, async_engine, runner) over an engine whose steps it lets through; returns the engine."""
    engine = make_engine(wrap=GatedRunner, **settings)

    async def started():
        async_engine = AsyncEngine(engine)
        async_engine.start()
        try:
            await test(app_over(engine, async_engine), async_engine, engine.runner)
        finally:
            engine.runner.open_for_good()
            await async_engine.shutdown()

    run(started())
    return engine


async def settle(app, runner):
    """Let every step through until a request sent now has its answer: all that was sent before has been drained."""
    runner.open_for_good()
    last = HandDriven(app, "/v1/completions", {"prompt": "hi", "max_tokens": 1})
    await last.task


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT, MESSAGES, RESPONSES])
def test_a_client_that_hangs_up_is_aborted_within_a_step(path, body, stream):
    async def test(app, async_engine, runner):
        client = HandDriven(app, path, {**body, "stream": stream})
        runner.let_through(2)
        await runner.wait_until_entered(3)
        await client.hang_up()
        assert async_engine.num_unfinished == 0
        await settle(app, runner)

    engine = with_app(test)
    assert steps_of(engine.runner.inner, NAMES[path]) == 3
    assert engine.scheduler.pool.num_free == 64


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_its_first_token_is_aborted_within_a_step(stream):
    async def test(app, async_engine, runner):
        client = HandDriven(app, COMPLETION[0], {**COMPLETION[1], "stream": stream})
        await runner.wait_until_entered()
        await client.hang_up()
        await settle(app, runner)

    assert steps_of(with_app(test).runner.inner, "cmpl-0-0") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_during_prefill_is_aborted_within_a_step(stream):
    async def test(app, async_engine, runner):
        client = HandDriven(app, COMPLETION[0], {"prompt": "a" * 40, "stream": stream})
        runner.let_through(2)
        await runner.wait_until_entered(3)
        await client.hang_up()
        await settle(app, runner)

    assert steps_of(with_app(test, max_num_batched_tokens=4).runner.inner, "cmpl-0-0") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_while_waiting_never_runs(stream):
    async def test(app, async_engine, runner):
        running = HandDriven(app, *COMPLETION)
        await runner.wait_until_entered()
        waiting = HandDriven(app, COMPLETION[0], {**COMPLETION[1], "stream": stream})
        while async_engine.num_unfinished < 2:
            await asyncio.sleep(0)
        runner.let_through(1)
        await runner.wait_until_entered()
        await waiting.hang_up()
        runner.open_for_good()
        await running.task

    engine = with_app(test, max_num_seqs=1)
    assert steps_of(engine.runner.inner, "cmpl-0-0") == 50
    assert steps_of(engine.runner.inner, "cmpl-1-0") == 0


def test_all_prompts_of_a_list_are_aborted():
    async def test(app, async_engine, runner):
        client = HandDriven(app, COMPLETION[0], {**COMPLETION[1], "prompt": ["a", "b", "c"], "stream": True})
        runner.let_through(1)
        await runner.wait_until_entered(2)
        await client.hang_up()
        await settle(app, runner)

    engine = with_app(test)
    assert [steps_of(engine.runner.inner, f"cmpl-0-{index}") for index in range(3)] == [2, 2, 2]
    assert engine.scheduler.pool.num_free == 64


def test_a_neighbour_of_a_client_that_hangs_up_goes_on():
    async def test(app, async_engine, runner):
        leaving, staying = HandDriven(app, *COMPLETION), HandDriven(app, *COMPLETION)
        await runner.wait_until_entered()
        await leaving.hang_up()
        runner.open_for_good()
        await staying.task
        assert (await staying.sent.get())["status"] == 200

    engine = with_app(test)
    assert steps_of(engine.runner.inner, "cmpl-1-0") == 50
    assert steps_of(engine.runner.inner, "cmpl-0-0") <= 2


def test_nothing_is_sent_after_a_stream_whose_client_hung_up():
    async def test(app, async_engine, runner):
        client = HandDriven(app, COMPLETION[0], {**COMPLETION[1], "stream": True})
        runner.let_through(1)
        assert (await client.sent.get())["type"] == "http.response.start"
        assert (await client.sent.get())["body"].startswith(b"data: {")
        await client.hang_up()
        await settle(app, runner)
        assert client.sent.empty()

    with_app(test)


def test_many_clients_that_hang_up_leave_nothing_behind():
    async def test(app, async_engine, runner):
        clients = [HandDriven(app, COMPLETION[0], {**COMPLETION[1], "stream": n % 2 == 0}) for n in range(30)]
        while async_engine.num_unfinished < 30:
            await asyncio.sleep(0)
        runner.let_through(2)
        await runner.wait_until_entered(2)
        await asyncio.gather(*(client.hang_up() for client in clients))
        assert async_engine.num_unfinished == 0
        await settle(app, runner)

    engine = with_app(test)
    assert engine.scheduler.pool.num_free == 64
    assert engine._answers == {}


def test_work_outlives_nothing_when_the_client_is_gone_first():
    async def test():
        ended = []

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def receive():
            await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGone):
            await while_connected(receive, work())
        assert ended == [True]

    run(test())


def test_a_result_and_an_exception_of_work_come_through():
    async def test():
        async def receive():
            await asyncio.Event().wait()

        async def good():
            return 5

        async def bad():
            raise ValueError("x")

        assert await while_connected(receive, good()) == 5
        with pytest.raises(ValueError, match="x"):
            await while_connected(receive, bad())

    run(test())
