"""Driving an AsyncEngine over a tiny engine from a test."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from millpond.core.sampling import SamplingParams
from millpond.engine.async_engine import AsyncEngine
from millpond.engine.call import EngineRequest
from tiny_engine import GatedRunner, ids, make_engine, run


def sampling(max_tokens=5, **settings):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)


async def collect(async_engine, request_id, prompt="hi", **settings):
    return [
        output
        async for output in outputs_of(async_engine, EngineRequest(request_id, ids(prompt), sampling(**settings)))
    ]


async def outputs_of(async_engine, *requests):
    """take() and outputs() in one: nothing is queued before the first output is asked for."""
    async with aclosing(async_engine.outputs(async_engine.take(requests))) as outputs:
        async for output in outputs:
            yield output


async def settle(async_engine):
    """Return when everything sent so far has been drained: the answer to a request sent last."""
    await collect(async_engine, "settle", max_tokens=1)


def with_started(test, engine, **settings):
    async def started():
        async_engine = AsyncEngine(engine, **settings)
        async_engine.start()
        try:
            return await test(async_engine)
        finally:
            await async_engine.shutdown()

    return run(started())


def gated(**settings):
    engine = make_engine(wrap=GatedRunner, **settings)
    return engine, engine.runner


async def as_the_loop_turns(async_engine, runner):
    """Let steps through until nobody waits for one, none ahead of what the loop has handed out."""
    given = 0
    while async_engine.num_unfinished:
        if given <= len(runner.inner.outputs):
            runner.let_through(1)
            given += 1
        await asyncio.sleep(0)
