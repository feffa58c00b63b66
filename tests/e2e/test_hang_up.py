"""Clients of the real model that hang up: the application is driven by hand, so that steps can be counted."""

from __future__ import annotations

import asyncio

import pytest

from e2e.real import Recorder, assert_nothing_is_left
from millpond.engine.async_engine import AsyncEngine
from millpond.lab.fresh_engine import engine_over
from tiny_engine import GatedRunner, run
from tiny_server import HandDriven, app_over

pytestmark = pytest.mark.slow

COMPLETION = ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True})
CHAT = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 500, "ignore_eos": True},
)


def with_app(base, test, **sizes):
    """Run test(app, runner, async_engine) over an engine whose steps it lets through, and then a request of 10 tokens.

    Returns the engine, in which nothing is left; engine.runner.inner has the tokens that each request cost.
    """
    engine = engine_over(base, wrap=lambda runner: GatedRunner(Recorder(runner)), **sizes)

    async def started():
        async_engine = AsyncEngine(engine)
        async_engine.start()
        app = app_over(engine, async_engine, model_names=("smollm2",))
        try:
            await test(app, engine.runner, async_engine)
            engine.runner.open_for_good()
            await HandDriven(app, "/v1/completions", {"prompt": "x", "max_tokens": 10, "ignore_eos": True}).task
        finally:
            engine.runner.open_for_good()
            await async_engine.shutdown()

    run(started())
    assert_nothing_is_left(engine)
    return engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_a_client_that_hangs_up_in_the_middle_costs_at_most_the_step_in_progress(base, path, body, stream):
    async def test(app, runner, async_engine):
        client = HandDriven(app, path, {**body, "stream": stream})
        runner.let_through(5)
        await runner.wait_until_entered(6)
        await client.hang_up()

    engine = with_app(base, test)
    name = "cmpl-0-0" if path == COMPLETION[0] else "chatcmpl-0"
    assert len(engine.runner.inner.token_ids[name]) == 6


def test_clients_that_hang_up_all_at_once_in_every_state_leave_nothing(base):
    """Some decode, some wait for a slot or for blocks, one is in the middle of a long prompt."""

    async def test(app, runner, async_engine):
        long = {**COMPLETION[1], "prompt": [7] * 300}
        clients = [
            HandDriven(
                app, COMPLETION[0], {**(long if n == 3 else COMPLETION[1]), "max_tokens": 40, "stream": n % 2 > 0}
            )
            for n in range(12)
        ]
        while async_engine.num_unfinished < 12:
            await asyncio.sleep(0)
        runner.let_through(3)
        await runner.wait_until_entered(3)
        await asyncio.gather(*(client.hang_up() for client in clients))
        assert async_engine.num_unfinished == 0

    engine = with_app(base, test, num_blocks=24, max_num_seqs=6, max_num_batched_tokens=64)
    cost = [len(token_ids) for name, token_ids in engine.runner.inner.token_ids.items() if name != "cmpl-12-0"]
    assert cost
    assert max(cost) <= 4


def test_a_neighbour_of_one_that_hangs_up_gets_the_answer_it_gets_alone(base):
    texts = []

    async def ask(app, runner, async_engine):
        runner.open_for_good()
        client = HandDriven(app, COMPLETION[0], {**COMPLETION[1], "temperature": 0, "max_tokens": 12})
        await client.task
        await client.sent.get()
        texts.append((await client.sent.get())["body"].split(b'"choices"')[1])

    async def test(app, runner, async_engine):
        leaving = HandDriven(app, *CHAT)
        runner.let_through(2)
        await runner.wait_until_entered(3)
        asking = asyncio.create_task(ask(app, runner, async_engine))
        await leaving.hang_up()
        await asking

    with_app(base, ask)
    with_app(base, test)
    assert texts[0] == texts[1]
