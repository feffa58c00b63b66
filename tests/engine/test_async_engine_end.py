from __future__ import annotations

import asyncio
import threading

import pytest

from async_helpers import collect, gated, with_started
from disk_stand_in import MemoryDisk
from millpond.core.disk_prefixes import DiskPrefixes
from millpond.core.request import FinishReason
from millpond.errors import EngineDeadError
from tiny_engine import BOUND_SECONDS, make_engine


def dies(engine, expected, use):
    """What a caller gets from an engine whose thread dies under it, and what health says after."""

    async def test(async_engine):
        with pytest.raises(EngineDeadError) as caught:
            await use(async_engine)
        assert isinstance(caught.value.__cause__, expected)
        assert not async_engine.is_healthy
        with pytest.raises(EngineDeadError):
            await collect(async_engine, "later")

    with_started(test, engine)


@pytest.mark.parametrize("step", [0, 3])
def test_every_caller_hears_of_the_death_of_the_engine_with_its_cause(step, caplog):
    engine = make_engine(raises={step: SystemExit("the process's own end")})

    async def use(async_engine):
        answers = await asyncio.gather(
            *(collect(async_engine, str(n), max_tokens=50) for n in range(3)), return_exceptions=True
        )
        assert all(isinstance(answer, EngineDeadError) for answer in answers)
        assert len({id(answer) for answer in answers}) == 3
        raise answers[0]

    dies(engine, SystemExit, use)


def test_a_broken_invariant_kills_the_engine_by_name(caplog):
    engine = make_engine(audit=True)
    engine.scheduler.pool.allocate(1)

    async def use(async_engine):
        with pytest.raises(EngineDeadError, match="INV-1"):
            await collect(async_engine, "a")
        await collect(async_engine, "b")

    dies(engine, Exception, use)


def test_a_failed_forward_does_not_kill_the_engine(caplog):
    async def test(async_engine):
        outputs = await collect(async_engine, "a")
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert async_engine.is_healthy
        assert len(await collect(async_engine, "b")) == 5

    with_started(test, make_engine(raises={0: RuntimeError("boom")}))


def test_shutdown_fails_the_waiting_at_once_and_leaves_the_engine_clean():
    engine, runner = gated()

    async def test(async_engine):
        task = asyncio.create_task(collect(async_engine, "a", max_tokens=50))
        await runner.wait_until_entered()
        stopping = asyncio.create_task(async_engine.shutdown())
        with pytest.raises(EngineDeadError, match="shutting down"):
            await task
        runner.open_for_good()
        await stopping
        assert not async_engine.is_healthy

    with_started(test, engine)
    assert engine.scheduler.requests == {}
    assert engine.scheduler.pool.num_free == 64


def test_shutdown_is_bounded_when_a_step_hangs(caplog):
    engine, runner = gated()

    async def test(async_engine):
        task = asyncio.create_task(collect(async_engine, "a"))
        await runner.wait_until_entered()
        await async_engine.shutdown(timeout=0.05)
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], EngineDeadError)
        text = "the step in progress has not ended in 0.05 s; the engine's thread is left behind"
        assert caplog.messages[-1] == text
        runner.open_for_good()

    with_started(test, engine)


def test_shutdown_says_where_it_is_the_disk_that_it_does_not_wait_for_and_what_is_not_on_it(caplog):
    engine = make_engine(disk=lambda runner: DiskPrefixes(MemoryDisk(runner), 4, lambda: 0.0))
    closing, go_on = threading.Event(), threading.Event()

    class Slow(MemoryDisk):
        num_unwritten = 7

        def close(self):
            closing.set()
            assert go_on.wait(BOUND_SECONDS)

    engine.scheduler.disk.store.__class__ = Slow

    async def test(async_engine):
        await collect(async_engine, "a")
        await async_engine.shutdown(timeout=0.05)
        assert closing.is_set()
        go_on.set()

    with_started(test, engine)
    assert (
        "writing prefixes to disk has not ended in 0.05 s; the engine's thread is left behind, and 7 blocks of K/V are "
        "not on disk" in caplog.text
    )
