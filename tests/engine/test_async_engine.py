from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from async_helpers import collect, gated, outputs_of, sampling, settle, with_started
from helpers import expected_output
from millpond.core.request import FinishReason
from millpond.engine.async_engine import AsyncEngine
from millpond.engine.call import EngineRequest, Mailbox
from millpond.errors import EngineDeadError, InvalidRequestError
from tiny_engine import BOUND_SECONDS, LETTERS, ids, make_engine, run, steps_of


def test_concurrent_callers_each_get_their_own_answer():
    async def test(async_engine):
        return await asyncio.gather(*(collect(async_engine, str(n), f"abc{n}", max_tokens=7) for n in range(8)))

    answers = with_started(test, make_engine(num_blocks=8, max_num_seqs=3))
    for number, outputs in enumerate(answers):
        tokens = [token for output in outputs for token in output.new_token_ids]
        assert tokens == expected_output(ids(f"abc{number}"), 7, LETTERS)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_caller_is_woken_at_its_own_last_token_while_others_go_on():
    engine, runner = gated()

    async def test(async_engine):
        long = asyncio.create_task(collect(async_engine, "long", max_tokens=50))
        await runner.wait_until_entered()
        short = asyncio.create_task(collect(async_engine, "short", max_tokens=2))
        await asyncio.sleep(0)  # let the task put its request into the inbox
        runner.let_through(3)
        assert len(await short) == 2
        assert not long.done()
        runner.open_for_good()
        assert len(await long) == 50

    with_started(test, engine)
    assert steps_of(runner.inner, "short") == 2


def test_a_request_has_arrived_when_it_was_made_and_not_when_a_step_saw_it():
    ended = []

    async def test(async_engine):
        async_engine.metrics.on_end = ended.append
        request = EngineRequest("a", ids("hi"), sampling(2), arrived=5.0)
        assert len([output async for output in outputs_of(async_engine, request)]) == 2

    with_started(test, make_engine())
    assert [times.arrived for times in ended] == [5.0]


def test_the_loop_is_woken_once_for_each_step():
    async def test(async_engine):
        loop = asyncio.get_running_loop()
        calls = []
        original = loop.call_soon_threadsafe

        def counted(*args, **settings):
            if threading.current_thread().name == "millpond-engine":
                calls.append(args)
            return original(*args, **settings)

        loop.call_soon_threadsafe = counted
        requests = [EngineRequest(str(number), ids("hi"), sampling(6)) for number in range(4)]
        outputs = [output async for output in outputs_of(async_engine, *requests)]
        assert len(outputs) == 24
        assert len(calls) == 6

    with_started(test, make_engine())


def test_a_caller_that_was_busy_gets_all_that_came_meanwhile_in_order_and_is_woken_once():
    async def test():
        mailbox, woken = Mailbox(), []

        async def read():
            while len(woken) < 2:
                woken.append(await mailbox.take())

        mailbox.put("a")
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert woken == [["a"]]
        mailbox.put("b")
        mailbox.put("c")
        await reader
        assert woken == [["a"], ["b", "c"]]

    run(test())


def test_an_invalid_request_is_refused_before_the_first_output_and_takes_no_step():
    engine = make_engine()

    async def test(async_engine):
        with pytest.raises(InvalidRequestError, match="empty"):
            await collect(async_engine, "a", prompt="")
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            await collect(async_engine, "a", max_tokens=10**9)
        assert async_engine.num_unfinished == 0

    with_started(test, engine)
    assert engine.runner.outputs == []


def test_one_bad_request_of_several_lets_none_in():
    engine = make_engine()

    async def test(async_engine):
        good, bad = EngineRequest("good", ids("hi"), sampling()), EngineRequest("bad", [], sampling())
        with pytest.raises(InvalidRequestError):
            await anext(outputs_of(async_engine, good, bad))

    with_started(test, engine)
    assert engine.runner.outputs == []


def test_a_request_id_in_use_is_refused_and_its_owner_is_not_disturbed():
    engine, runner = gated()

    async def test(async_engine):
        first = asyncio.create_task(collect(async_engine, "a"))
        await runner.wait_until_entered()
        with pytest.raises(InvalidRequestError, match="already in use"):
            await collect(async_engine, "a")
        runner.open_for_good()
        assert len(await first) == 5

    with_started(test, engine)


def test_an_id_that_only_the_engine_knows_is_refused_to_its_caller_alone():
    engine, runner = gated()
    engine.add_request("a", ids("hi"), sampling(5))

    async def test(async_engine):
        await runner.wait_until_entered()
        both = asyncio.gather(collect(async_engine, "a"), collect(async_engine, "b"), return_exceptions=True)
        await asyncio.sleep(0)  # let both put their requests into the inbox
        runner.open_for_good()
        refused, fine = await both
        assert isinstance(refused, InvalidRequestError)
        assert len(fine) == 5

    with_started(test, engine)


def test_a_cancelled_caller_is_aborted_within_a_step():
    engine, runner = gated()

    async def test(async_engine):
        task = asyncio.create_task(collect(async_engine, "a", max_tokens=50))
        runner.let_through(2)
        await runner.wait_until_entered(3)
        task.cancel()
        await asyncio.wait([task])
        runner.open_for_good()
        await settle(async_engine)
        assert async_engine.num_unfinished == 0

    with_started(test, engine)
    assert steps_of(runner.inner, "a") == 3
    assert engine.scheduler.pool.num_free == 64


def test_closing_the_generator_aborts_and_an_unstarted_one_never_enters():
    engine, runner = gated()

    async def test(async_engine):
        never = outputs_of(async_engine, EngineRequest("never", ids("hi"), sampling(50)))
        runner.let_through(1)
        async with aclosing(outputs_of(async_engine, EngineRequest("a", ids("hi"), sampling(50)))) as outputs:
            await anext(outputs)
        await never.aclose()
        runner.open_for_good()
        await settle(async_engine)

    with_started(test, engine)
    assert steps_of(runner.inner, "a") <= 2
    assert steps_of(runner.inner, "never") == 0


def test_a_caller_that_leaves_while_waiting_never_runs():
    engine, runner = gated(max_num_seqs=1)

    async def test(async_engine):
        running = asyncio.create_task(collect(async_engine, "running", max_tokens=4))
        await runner.wait_until_entered()
        waiting = asyncio.create_task(collect(async_engine, "waiting"))
        await asyncio.sleep(0)
        runner.let_through(1)
        await runner.wait_until_entered()
        waiting.cancel()
        await asyncio.wait([waiting])
        runner.open_for_good()
        await running

    with_started(test, engine)
    assert steps_of(runner.inner, "waiting") == 0


def test_many_aborts_leave_nothing_behind():
    engine, runner = gated(max_num_seqs=2)

    async def test(async_engine):
        tasks = [asyncio.create_task(collect(async_engine, str(n), max_tokens=50)) for n in range(40)]
        runner.let_through(3)
        await runner.wait_until_entered(4)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        runner.open_for_good()
        await settle(async_engine)
        assert async_engine._calls == {}
        assert async_engine._inbox == []

    with_started(test, engine)
    assert engine.scheduler.pool.num_free == 64
    assert engine.scheduler.requests == {}
    assert engine._answers == {}


def test_the_thread_sleeps_once_and_without_a_clock_until_there_is_something_to_do():
    async def test():
        async_engine = AsyncEngine(make_engine())
        timeouts, asleep, original = [], threading.Semaphore(0), async_engine._wake.wait

        def recorded(timeout=None):
            timeouts.append(timeout)
            asleep.release()
            return original(timeout)

        async_engine._wake.wait = recorded
        async_engine.start()
        for number in range(3):
            assert await asyncio.to_thread(asleep.acquire, timeout=BOUND_SECONDS)
            await collect(async_engine, str(number), max_tokens=2)
        assert await asyncio.to_thread(asleep.acquire, timeout=BOUND_SECONDS)
        await async_engine.shutdown()
        assert timeouts == [None] * 4

    run(test())


def test_an_engine_that_has_not_started_says_so():
    async def test():
        async_engine = AsyncEngine(make_engine())
        assert not async_engine.is_healthy
        with pytest.raises(EngineDeadError, match="not started"):
            await collect(async_engine, "a")

    run(test())


def test_the_last_step_is_known_and_the_engines_observer_still_hears():
    engine = make_engine()
    heard = []
    engine.observer = heard.append

    async def test(async_engine):
        assert async_engine.last_step is None
        await collect(async_engine, "a", max_tokens=3)
        assert async_engine.last_step in heard

    with_started(test, engine)
    assert [each.step for each in heard][:3] == [0, 1, 2]
