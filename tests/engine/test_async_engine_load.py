"""The bounds on what an AsyncEngine takes on, and how it knows that its thread is stuck."""

from __future__ import annotations

import asyncio

import pytest

from async_helpers import as_the_loop_turns, collect, gated, sampling, settle, with_started
from millpond.config import LoadLimits
from millpond.engine.call import EngineRequest
from millpond.errors import InvalidRequestError, OverloadedError, RequestTimeoutError, SlowReaderError
from tiny_engine import FakeClock, ids, make_engine, steps_of


def request(name, max_tokens=50, prompt="hi", timeout=None):
    return EngineRequest(name, ids(prompt), sampling(max_tokens), timeout)


async def rest_of(async_engine, call):
    return [output async for output in async_engine.outputs(call)]


def test_the_queue_is_bounded_and_one_that_was_refused_takes_no_place():
    engine, runner = gated(max_num_seqs=2)

    async def test(async_engine):
        calls = [async_engine.take([request(str(number), max_tokens=3)]) for number in range(3)]
        for _ in range(5):
            with pytest.raises(OverloadedError) as caught:
                async_engine.take([request("more")])
        assert caught.value.bound == "requests"
        assert (async_engine.num_unfinished, async_engine.num_queued) == (3, 3)
        runner.open_for_good()
        for call in calls:
            assert len(await rest_of(async_engine, call)) == 3
        assert async_engine.num_queued == 0
        assert len(await collect(async_engine, "more")) == 5

    with_started(test, engine, load=LoadLimits(max_waiting_requests=1))
    assert engine.scheduler.pool.num_free == 64


def test_an_admitted_request_makes_room_in_the_queue_and_not_in_its_slot():
    engine, runner = gated(max_num_seqs=1)

    async def test(async_engine):
        first = async_engine.take([request("first")])
        runner.let_through(1)
        await runner.wait_until_entered(2)
        await asyncio.sleep(0)  # the first step's outputs are handed out
        assert async_engine.num_queued == 0
        second = async_engine.take([request("second")])
        with pytest.raises(OverloadedError):
            async_engine.take([request("third")])
        async_engine.release(second)
        third = async_engine.take([request("third")])
        for call in (first, third):
            async_engine.release(call)
        runner.open_for_good()
        await settle(async_engine)

    with_started(test, engine, load=LoadLimits(max_waiting_requests=1))
    assert steps_of(runner.inner, "third") == 0


def test_a_place_is_free_when_the_engine_is_done_whether_its_answer_was_read_or_not():
    engine, runner = gated(max_num_seqs=1)

    async def test(async_engine):
        unread = async_engine.take([request("unread", max_tokens=1)])
        with pytest.raises(OverloadedError):
            async_engine.take([request("next")])
        runner.open_for_good()
        while not unread.mailbox:
            await asyncio.sleep(0)
        assert len(await collect(async_engine, "next")) == 5
        assert len(await rest_of(async_engine, unread)) == 1

    with_started(test, engine, load=LoadLimits(max_waiting_requests=0))


def test_the_time_to_wait_follows_from_the_answers_that_finished():
    engine, runner = gated(max_num_seqs=1)
    clock = FakeClock()

    async def test(async_engine):
        calls = [async_engine.take([request(str(number), max_tokens=1)]) for number in range(4)]
        for _ in range(2):
            clock.now += 4.0
            before = len(runner.inner.outputs)
            runner.let_through(1)
            while len(runner.inner.outputs) == before:
                await asyncio.sleep(0)
        for call in calls[:2]:
            await rest_of(async_engine, call)
        with pytest.raises(OverloadedError) as caught:
            async_engine.take([request(f"more-{number}") for number in range(2)])
        assert caught.value.retry_after == 4  # one too many, and each took four seconds
        runner.open_for_good()

    with_started(test, engine, load=LoadLimits(max_waiting_requests=3), clock=clock)


def test_a_list_is_queued_whole_or_not_at_all():
    engine, runner = gated(max_num_seqs=1)

    async def test(async_engine):
        call = async_engine.take([request("a"), request("b")])
        with pytest.raises(OverloadedError):
            async_engine.take([request("c"), request("d")])
        assert async_engine.num_unfinished == 2
        async_engine.take([request("e")])
        async_engine.release(call)
        runner.open_for_good()

    with_started(test, engine, load=LoadLimits(max_waiting_requests=2))
    assert steps_of(runner.inner, "c") == steps_of(runner.inner, "d") == 0


@pytest.mark.parametrize(
    ("load", "timeout", "words"),
    [
        (LoadLimits(), 20.0, "longer than its limit of 20 s"),
        (LoadLimits(request_timeout=20.0), None, "longer than its limit of 20 s"),
        (LoadLimits(request_timeout=60.0), 20.0, "longer than its limit of 20 s"),
    ],
)
def test_a_request_ends_when_its_time_is_over_and_its_blocks_come_back(load, timeout, words):
    engine, runner = gated()
    clock = FakeClock()

    async def test(async_engine):
        late = asyncio.create_task(rest_of(async_engine, async_engine.take([request("late", timeout=timeout)])))
        await runner.wait_until_entered()
        clock.now += 19.9
        async_engine.end_overdue()
        runner.let_through(1)
        await runner.wait_until_entered()
        assert not late.done()
        clock.now += 0.1
        async_engine.end_overdue()
        with pytest.raises(RequestTimeoutError, match=words) as caught:
            await late
        assert caught.value.code == "request_timeout"
        runner.open_for_good()
        await settle(async_engine)
        assert len(async_engine._deadlines) == (load.request_timeout is not None)

    with_started(test, engine, load=load, clock=clock)
    assert steps_of(runner.inner, "late") == 2
    assert engine.scheduler.pool.num_free == 64


def test_a_request_that_waits_too_long_never_runs_and_one_that_was_admitted_may_go_on():
    engine, runner = gated(max_num_seqs=1)
    clock = FakeClock()

    async def test(async_engine):
        running = asyncio.create_task(rest_of(async_engine, async_engine.take([request("running", max_tokens=4)])))
        waiting = asyncio.create_task(rest_of(async_engine, async_engine.take([request("waiting")])))
        runner.let_through(1)
        await runner.wait_until_entered(2)
        await asyncio.sleep(0)  # the first step's outputs are handed out
        clock.now += 5.0
        async_engine.end_overdue()
        with pytest.raises(RequestTimeoutError, match="waited for 5 s") as caught:
            await waiting
        assert caught.value.code == "queue_timeout"
        runner.open_for_good()
        assert len(await running) == 4

    with_started(test, engine, load=LoadLimits(queue_timeout=5.0), clock=clock)
    assert steps_of(runner.inner, "waiting") == 0
    assert engine.scheduler.pool.num_free == 64


def test_the_alarm_is_set_for_the_soonest_deadline_that_still_counts():
    engine, runner = gated()
    clock = FakeClock()

    async def test(async_engine):
        now = asyncio.get_running_loop().time
        slow = async_engine.take([request("slow", timeout=500.0)])
        fast = async_engine.take([request("fast", timeout=50.0)])
        assert 40 < async_engine._alarm.when() - now() < 60
        async_engine.release(fast)
        async_engine.end_overdue()
        assert 400 < async_engine._alarm.when() - now() < 600
        async_engine.release(slow)
        async_engine.end_overdue()
        assert async_engine._alarm is None
        runner.open_for_good()

    with_started(test, engine, clock=clock)


def test_deadlines_of_calls_that_are_over_are_not_kept():
    async def test(async_engine):
        for number in range(500):
            await rest_of(async_engine, async_engine.take([request(str(number), max_tokens=1)]))
        assert len(async_engine._deadlines) <= 128

    with_started(test, make_engine(), load=LoadLimits(request_timeout=600.0, queue_timeout=100.0))


@pytest.mark.parametrize(("timeout", "numbers"), [(0, ("0",)), (-1.0, ("-1.0",)), (11, ("11", "10 s"))])
def test_a_timeout_that_cannot_be_is_refused_by_name(timeout, numbers):
    async def test(async_engine):
        with pytest.raises(InvalidRequestError) as caught:
            async_engine.take([request("a", timeout=timeout)])
        assert caught.value.param == "timeout"
        assert all(number in str(caught.value) for number in numbers)

    with_started(test, make_engine(), load=LoadLimits(request_timeout=10.0))


def test_a_step_that_takes_too_long_is_trouble_until_it_is_over():
    engine, runner = gated()
    clock = FakeClock()

    async def test(async_engine):
        clock.now += 1000.0
        assert async_engine.trouble is None  # idle for long is fine
        answer = asyncio.create_task(collect(async_engine, "a"))
        await runner.wait_until_entered()
        clock.now += 60.0
        assert async_engine.is_healthy
        clock.now += 1.0
        assert not async_engine.is_healthy
        assert "the step in progress has taken 61 s, more than 60 s" in async_engine.trouble
        runner.let_through(1)
        await runner.wait_until_entered()
        assert async_engine.is_healthy
        runner.open_for_good()
        await answer
        clock.now += 1000.0
        assert async_engine.is_healthy

    with_started(test, engine, clock=clock)


def test_an_answer_that_nobody_reads_is_ended_at_a_bound_and_its_neighbour_never_waits(caplog):
    engine, runner = gated(num_blocks=600, max_model_len=2000)

    async def test(async_engine):
        unread = async_engine.take([request("unread", max_tokens=1500)])
        reader = asyncio.create_task(collect(async_engine, "read", max_tokens=200))
        steps = asyncio.create_task(as_the_loop_turns(async_engine, runner))
        assert len(await reader) == 200
        await steps
        runner.open_for_good()
        assert len(unread.mailbox) == 1
        with pytest.raises(SlowReaderError, match=r"\d+ pieces of it were left unread"):
            await rest_of(async_engine, unread)
        await settle(async_engine)
        assert "request unread is aborted: its client has left" in caplog.text

    with_started(test, engine, load=LoadLimits(max_unread_outputs=20))
    assert steps_of(runner.inner, "unread") < 1500
    assert steps_of(runner.inner, "read") == 200
    assert engine.scheduler.pool.num_free == 600


def test_a_reader_whose_loop_was_busy_is_not_a_slow_one():
    engine, runner = gated(num_blocks=600, max_model_len=2000, max_num_batched_tokens=64)

    async def test(async_engine):
        answer = asyncio.create_task(rest_of(async_engine, async_engine.take([request("a", max_tokens=500)])))
        await runner.wait_until_entered()
        runner.open_for_good()
        while len(runner.inner.outputs) < 300:  # the loop is held, and the outputs of 300 steps pile up before it
            pass
        assert len(await answer) == 500

    with_started(test, engine, load=LoadLimits(max_unread_outputs=20))
