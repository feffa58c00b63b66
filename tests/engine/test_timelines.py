from __future__ import annotations

import asyncio

import pytest

from async_helpers import gated, outputs_of, sampling, settle, with_started
from engine_helpers import drive
from millpond.config import LoadLimits
from millpond.core.notes import Blocked
from millpond.core.request import SamplingParams
from millpond.core.speculation import PromptLookup
from millpond.engine.call import EngineRequest
from millpond.engine.timeline import FIRST_ENTRIES, MOST_ENTRIES, Counts, Origin, Timeline, text_of
from millpond.engine.timelines import Timelines
from millpond.errors import RequestTimeoutError
from tiny_engine import FakeClock, ids, make_engine


def timed(**settings):
    """A tiny engine with timelines, on a clock that a test moves."""
    engine = make_engine(**{"prefix_cache": False, **settings})
    engine._clock = FakeClock()
    engine.timelines = Timelines(engine.scheduler, engine.now)
    return engine


def ask(engine, request_id, prompt="hi", max_tokens=4):
    engine.add_request(request_id, ids(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def steps(engine, count):
    """So many steps, each a second after the one before, which take no time."""
    for _ in range(count):
        engine._clock.now += 1.0
        engine.step()


def entries(engine, request_id):
    """(event, first step, last step, its numbers but for those that are nothing) of each entry."""
    found = engine.timelines.get(request_id).entries
    return [(it.event, it.step, it.last_step, {k: v for k, v in it.figures().items() if v is not None}) for it in found]


def events(engine, request_id):
    return [entry[0] for entry in entries(engine, request_id)]


def test_a_request_alone_is_queued_admitted_computed_and_finished():
    engine = timed()
    ask(engine, "a", prompt="123456", max_tokens=3)
    steps(engine, 4)
    assert entries(engine, "a") == [
        ("queued", 0, 0, {"prompt_tokens": 6, "max_tokens": 3, "behind": 0}),
        ("admitted", 0, 0, {"blocks": 2, "tokens": 6, "found_tokens": 0}),
        ("computed", 0, 0, {"tokens": 6, "chunks": 1}),
        ("first_token", 0, 0, {}),
        ("finished", 2, 2, {"reason": "length", "output_tokens": 3}),
    ]
    assert [each.time for each in engine.timelines.get("a").entries] == [100.0, 101.0, 101.0, 101.0, 103.0]


def test_chunks_are_one_entry_from_the_first_step_to_the_last():
    engine = timed(max_num_batched_tokens=4, max_num_seqs=2)
    ask(engine, "a", prompt="1234567890", max_tokens=2)
    steps(engine, 2)
    assert entries(engine, "a")[-1] == ("computed", 0, 1, {"tokens": 8, "chunks": 2})
    assert engine.timelines.get("a").counts == Counts(10, 2, 0, 8, 3)
    steps(engine, 1)
    assert entries(engine, "a")[-2:] == [("computed", 0, 2, {"tokens": 10, "chunks": 3}), ("first_token", 2, 2, {})]
    last = engine.timelines.get("a").entries[-2]
    assert (last.time, last.last_time) == (101.0, 103.0)


def blocked(engine, request_id):
    """The blocked entry that comes last, of its request."""
    entry = entries(engine, request_id)[-1]
    assert entry[0] == "blocked"
    return entry


def test_the_head_is_blocked_on_slots_for_as_long_as_they_are_taken():
    engine = timed(max_num_seqs=1)
    for name in "abc":
        ask(engine, name, max_tokens=4)
    steps(engine, 3)
    assert blocked(engine, "b") == ("blocked", 0, 2, {"on": "slots", "need": 1, "free": 0, "total": 1, "held_back": 0})
    assert events(engine, "c") == ["queued"]
    assert engine.timelines.get("b").lack == "needs a slot; 0 of 1 are free"
    steps(engine, 2)
    assert events(engine, "b") == ["queued", "blocked", "admitted", "computed", "first_token"]
    summary = engine.timelines.get("b").summary(engine.now())
    # Slots were what it lacked from the step at 101 to the one at 105.
    assert (summary.queued_seconds, summary.waiting_seconds, summary.blocked_seconds) == (5.0, 5.0, {"slots": 4.0})
    assert engine.timelines.get("b").lack is None
    assert events(engine, "c") == ["queued", "blocked"]


def test_the_head_is_blocked_on_blocks_and_says_how_many_are_free_now():
    engine = timed(num_blocks=8, max_num_seqs=3)
    ask(engine, "a", prompt="1" * 16, max_tokens=10)
    ask(engine, "b", prompt="2" * 20, max_tokens=2)
    steps(engine, 2)
    assert blocked(engine, "b") == (
        *("blocked", 0, 1),
        {"on": "blocks", "need": 5, "free": 3, "total": 8, "held_back": 0},
    )
    assert engine.timelines.get("b").lack == "needs 5 blocks; 3 of 8 are free"


def test_the_head_is_blocked_on_the_reserve_where_that_alone_keeps_it_out():
    engine = timed(num_blocks=8, watermark_blocks=3)
    ask(engine, "a", prompt="1" * 12, max_tokens=2)
    ask(engine, "b", prompt="2" * 12, max_tokens=2)
    steps(engine, 1)
    assert blocked(engine, "b")[3] == {"on": "reserve", "need": 3, "free": 5, "total": 8, "held_back": 3}
    lack = engine.timelines.get("b").lack
    assert lack == "needs 3 blocks; 5 of 8 are free, 3 of them held back from newcomers"
    assert engine.scheduler.counters.watermark_delays == 1


def test_no_more_blocks_are_said_to_be_held_back_than_are_free():
    figures = {"on": "blocks", "need": 9, "free": 2, "total": 8, "held_back": 3}
    assert text_of("blocked", figures) == "needs 9 blocks; 2 of 8 are free, 2 of them held back from newcomers"
    assert text_of("blocked", {**figures, "need": 1, "free": 0}) == "needs 1 block; 0 of 8 are free"


def test_the_head_is_blocked_on_the_budget_of_the_step():
    engine = timed(max_num_batched_tokens=4, max_num_seqs=4)
    ask(engine, "a", prompt="1" * 8, max_tokens=2)
    ask(engine, "b")
    steps(engine, 1)
    assert blocked(engine, "b")[3] == {"on": "budget", "need": 1, "free": 0, "total": 4, "held_back": 0}
    assert engine.timelines.get("b").lack == "needs a token of the step; those that run take all 4"


def test_the_head_waits_a_step_for_a_block_that_another_computes():
    engine = timed(prefix_cache=True)
    ask(engine, "a", prompt="12345678")
    ask(engine, "b", prompt="12345678")
    steps(engine, 2)
    assert [(it[0], it[1], it[3].get("on"), it[3].get("found_tokens")) for it in entries(engine, "b")[1:3]] == [
        ("blocked", 0, "prefix", None),
        ("admitted", 1, None, 4),
    ]


def crowded():
    """The eight of the scheduler's numbers: four evictions, 36 positions computed again."""
    engine = timed(num_blocks=8, max_num_seqs=3)
    for number in range(8):
        ask(engine, str(number), prompt="123456", max_tokens=10)
    return engine


def test_a_preempted_request_says_by_whom_what_it_lost_and_what_it_found_again():
    engine = crowded()
    steps(engine, 4)
    assert entries(engine, "2")[-2:] == [
        ("preempted", 3, 3, {"blocks": 2, "computed_tokens": 8}),
        ("blocked", 3, 3, {"on": "blocks", "need": 3, "free": 2, "total": 8, "held_back": 0}),
    ]
    steps(engine, 100)
    assert engine.scheduler.counters.preemptions == 4
    every = [engine.timelines.get(str(number)) for number in range(8)]
    assert sum(each.num_preemptions for each in every) == 4
    assert sum(each.num_recomputed_tokens for each in every) == engine.scheduler.counters.recomputed_tokens == 36
    assert events(engine, "2")[5:] == ["blocked", "resumed", "computed", "finished"]
    assert entries(engine, "2")[-2][3] == {"tokens": 9, "chunks": 1}
    summary = every[2].summary(engine.now())
    resumed = every[2].entries[-3]
    assert summary.waiting_seconds - summary.queued_seconds == resumed.time - 104.0 == summary.blocked_seconds["blocks"]


def test_who_is_the_head_no_more_because_a_preempted_one_is_lacks_nothing_but_its_place():
    engine = crowded()
    steps(engine, 3)
    assert engine.timelines.get("3").lack == "needs a slot; 0 of 3 are free"
    steps(engine, 2)
    former = engine.timelines.get("3")
    assert former.lack is None
    assert (former.entries[-1].last_step, former.entries[-1].last_time) == (2, 104.0)
    assert former.summary(engine.now()).blocked_seconds == {"slots": 3.0}
    assert engine.timelines.places() == {"2": 0, "3": 1, "4": 2, "5": 3, "6": 4, "7": 5}


def test_a_preempted_request_names_the_older_one_that_grew():
    engine = timed(num_blocks=5, max_num_seqs=2)
    ask(engine, "a", prompt="1" * 7, max_tokens=6)
    ask(engine, "b", prompt="2" * 9, max_tokens=3)
    steps(engine, 3)
    assert entries(engine, "b")[-2][:1] + entries(engine, "b")[-2][3:] == (
        "preempted",
        {"by": "a", "blocks": 3, "computed_tokens": 10},
    )
    assert entries(engine, "b")[-2][1] == 2


def test_a_resumed_request_says_how_much_it_found_again():
    engine = timed(num_blocks=5, max_num_seqs=2, prefix_cache=True)
    ask(engine, "a", prompt="1" * 7, max_tokens=6)
    ask(engine, "b", prompt="2" * 9, max_tokens=3)
    drive(engine)
    [resumed] = [entry for entry in entries(engine, "b") if entry[0] == "resumed"]
    assert resumed[3]["found_tokens"] == engine.scheduler.counters.resumed_hit_tokens > 0
    assert engine.timelines.get("b").num_recomputed_tokens == engine.scheduler.counters.recomputed_tokens


@pytest.mark.parametrize("is_running", [False, True])
def test_an_aborted_request_ends_with_the_cause_in_either_queue(is_running):
    engine = timed(max_num_seqs=1)
    ask(engine, "a", max_tokens=20)
    ask(engine, "b")
    steps(engine, 2)
    name = "a" if is_running else "b"
    engine._clock.now += 0.5
    engine.abort(name, "client_gone")
    assert entries(engine, name)[-1][3] == {
        "reason": "abort",
        "cause": "client_gone",
        "output_tokens": 2 if is_running else 0,
    }
    assert engine.timelines.get(name).state == "finished"
    assert engine.timelines.get(name).entries[-1].time == 102.5
    steps(engine, 2)
    assert events(engine, name).count("finished") == 1
    assert events(engine, "b")[-1] == ("first_token" if is_running else "finished")


def test_a_request_that_fails_ends_with_its_error():
    engine = timed(faults={"a": 1}, raises={3: RuntimeError("boom")})
    ask(engine, "a")
    ask(engine, "b", max_tokens=10)
    steps(engine, 4)
    assert entries(engine, "a")[-1] == (
        *("finished", 1, 1),
        {"reason": "error", "error": "the logits are not finite", "output_tokens": 1},
    )
    assert entries(engine, "b")[-1] == (
        *("finished", 3, 3),
        {"reason": "error", "error": "the forward pass of this step failed", "output_tokens": 3},
    )


def test_a_stop_string_is_a_stop_and_a_failed_text_an_error(caplog):
    engine = timed(script={"a": ids("xyz")})
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=3, stop=("yz",), ignore_eos=True))
    steps(engine, 3)
    assert entries(engine, "a")[-1][3] == {"reason": "stop", "output_tokens": 3}


def test_guesses_that_come_right_are_no_chunks_of_the_prompt():
    engine = timed(drafter=PromptLookup(8), script={"a": ids("abcabcabc")})
    ask(engine, "a", prompt="abcabcabcabc", max_tokens=9)
    drive(engine)
    assert engine.scheduler.counters.accepted_tokens > 0
    assert entries(engine, "a")[2] == ("computed", 0, 0, {"tokens": 12, "chunks": 1})


def test_only_the_last_of_those_that_ended_are_kept_and_nothing_of_their_text():
    engine = timed(max_num_seqs=2)
    engine.timelines = Timelines(engine.scheduler, engine.now, most_finished=3)
    ask(engine, "0", max_tokens=1)
    drive(engine)
    for number in range(1, 6):
        ask(engine, str(number), max_tokens=1)
    drive(engine)
    kept = [number for number in range(6) if engine.timelines.get(str(number)) is not None]
    assert kept == [3, 4, 5]
    assert [engine.timelines.get(str(number)).request for number in kept] == [None] * 3
    assert engine.timelines.unfinished == []


def test_an_id_that_comes_again_is_kept_by_its_newest_request():
    engine = timed()
    engine.timelines = Timelines(engine.scheduler, engine.now, most_finished=2)
    for count in (1, 2, 3):
        ask(engine, "a", max_tokens=count)
        drive(engine)
    assert engine.timelines.get("a").counts.output_tokens == 3
    ask(engine, "b", max_tokens=1)
    drive(engine)
    assert engine.timelines.get("a").counts.output_tokens == 3
    for name in "cd":
        ask(engine, name, max_tokens=1)
        drive(engine)
    assert engine.timelines.get("a") is None


def test_the_end_of_a_request_is_not_that_of_one_which_waits_for_its_id():
    engine = timed()
    ask(engine, "a", max_tokens=9)
    steps(engine, 1)
    engine.timelines.take("a", 101.5, 7, Origin())
    engine.abort("a")
    assert (engine.timelines.get("a").state, engine.timelines.get("a").counts) == ("queued", Counts(7))


def test_a_timeline_has_a_bound_and_keeps_its_beginning_its_end_and_its_sums():
    timeline = Timeline("a", 0.0, Counts(1))
    for step in range(100):
        on = ("slots", "blocks")[step % 2]
        timeline.add("queued", step, float(step), number=step) if step == 0 else timeline.block(
            Blocked("a", on, 1, 0, 1), step, float(step)
        )
    assert len(timeline.entries) == MOST_ENTRIES
    assert timeline.num_left_out == 100 - MOST_ENTRIES
    kept = [each.step for each in timeline.entries]
    assert kept == [*range(FIRST_ENTRIES), *range(100 - MOST_ENTRIES + FIRST_ENTRIES, 100)]
    assert timeline.summary(100.0).blocked_seconds == {"blocks": 50.0, "slots": 49.0}


def test_decoding_writes_nothing():
    engine = timed()
    for name in "abc":
        ask(engine, name, max_tokens=30)
    steps(engine, 1)
    before = [entries(engine, name) for name in "abc"]
    steps(engine, 20)
    assert [entries(engine, name) for name in "abc"] == before


def test_the_others_stand_behind_the_head_and_that_is_counted_when_somebody_asks():
    engine = timed(max_num_seqs=1)
    for name in "abcd":
        ask(engine, name)
    assert engine.timelines.places() == {"a": 0, "b": 1, "c": 2, "d": 3}
    steps(engine, 1)
    engine.timelines.take("e", 101.0, 5, Origin())
    assert engine.timelines.places() == {"b": 0, "c": 1, "d": 2, "e": 3}
    assert engine.timelines.get("e").state == "queued"
    engine.timelines.drop("e")
    assert engine.timelines.places() == {"b": 0, "c": 1, "d": 2}


def test_a_request_is_found_by_its_other_names_before_and_after_its_end():
    engine = timed()
    for number in range(3):
        engine.timelines.take(f"x-{number}", 100.0, 2, Origin(("x", "header")))
        ask(engine, f"x-{number}", max_tokens=1 + number)
    steps(engine, 2)
    for name in ("x", "header"):
        assert [each.request_id for each in engine.timelines.find(name)] == ["x-0", "x-1", "x-2"]
    assert [each.state for each in engine.timelines.find("x")] == ["finished", "finished", "running"]
    assert [each.request_id for each in engine.timelines.find("x-1")] == ["x-1"]
    assert engine.timelines.find("y") == []


def test_the_choices_of_an_answer_are_one_summary():
    engine = crowded()
    steps(engine, 100)
    every = [str(number) for number in range(8)]
    each = [engine.timelines.summary([name]) for name in every]
    joined = engine.timelines.summary([*every, "unknown"])
    assert joined.preemptions == 4
    assert joined.recomputed_tokens == 36
    assert joined.waiting_seconds == max(it.waiting_seconds for it in each) == each[-1].waiting_seconds
    assert engine.timelines.summary(["unknown"]) is None


def request(name, **settings):
    return EngineRequest(name, ids("hi"), sampling(**settings.pop("sampling", {})), **settings)


async def rest_of(async_engine, *requests):
    return [output async for output in outputs_of(async_engine, *requests)]


def end_of(engine, name):
    """Reason and cause."""
    figures = engine.timelines.get(name).entries[-1].figures()
    return figures["reason"], figures["cause"]


def test_a_request_that_the_engine_has_not_seen_has_a_timeline_and_is_queued():
    engine, runner = gated()

    async def test(async_engine):
        first = asyncio.create_task(rest_of(async_engine, request("first")))
        await runner.wait_until_entered()
        second = asyncio.create_task(rest_of(async_engine, request("second")))
        while async_engine.num_unfinished < 2:
            await asyncio.sleep(0)
        timeline = engine.timelines.get("second")
        seen = timeline.state, list(timeline.entries), timeline.counts.prompt_tokens, engine.timelines.places()
        runner.open_for_good()
        await asyncio.gather(first, second)
        return seen

    assert with_started(test, engine) == ("queued", [], 2, {"second": 0})
    assert engine.timelines.get("second").state == "finished"
    assert engine.timelines.get("second").entries[0].step == 1


def test_what_the_engine_refuses_leaves_no_timeline(monkeypatch):
    engine = make_engine()

    async def test(async_engine):
        monkeypatch.setattr(engine.scheduler, "add_request", refuse)
        with pytest.raises(RequestTimeoutError):
            await rest_of(async_engine, request("a"))

    def refuse(request):
        raise RequestTimeoutError("no", "queue_timeout")

    with_started(test, engine)
    assert engine.timelines.get("a") is None


@pytest.mark.parametrize(
    ("load", "own", "cause"),
    [
        (LoadLimits(queue_timeout=5.0), {}, "queue_timeout"),
        (LoadLimits(), {"timeout": 5.0}, "request_timeout"),
        (LoadLimits(), {"deadline_ms": 5000}, "deadline_waiting"),
    ],
)
def test_a_request_whose_time_is_over_says_which_limit_it_was(load, own, cause):
    engine, runner = gated(max_num_seqs=1)
    clock = FakeClock()

    async def test(async_engine):
        running = asyncio.create_task(rest_of(async_engine, request("running")))
        await runner.wait_until_entered()
        waiting = asyncio.create_task(rest_of(async_engine, request("waiting", **own)))
        runner.let_through(1)
        await runner.wait_until_entered()
        await asyncio.sleep(0)
        clock.now += 5.0
        async_engine.end_overdue()
        with pytest.raises(RequestTimeoutError):
            await waiting
        runner.open_for_good()
        await running
        await settle(async_engine)

    with_started(test, engine, load=load, clock=clock)
    assert end_of(engine, "waiting") == ("abort", cause)
    assert "admitted" not in events(engine, "waiting")
    assert end_of(engine, "running") == ("length", None)


def test_a_request_that_the_engine_finds_expired_says_that_its_deadline_was():
    engine, runner = gated(max_num_seqs=1)
    clock = FakeClock()

    async def test(async_engine):
        running = asyncio.create_task(rest_of(async_engine, request("running")))
        await runner.wait_until_entered()
        waiting = asyncio.create_task(rest_of(async_engine, request("waiting", deadline_ms=5000)))
        await asyncio.sleep(0)
        clock.now += 5.0
        runner.open_for_good()
        with pytest.raises(RequestTimeoutError):
            await waiting
        await running

    with_started(test, engine, clock=clock)
    assert end_of(engine, "waiting") == ("abort", "deadline_waiting")


def test_a_client_that_goes_one_that_does_not_read_and_a_choice_that_fails_are_told_apart():
    engine, runner = gated(faults={"bad": 0})

    async def test(async_engine):
        gone = asyncio.create_task(rest_of(async_engine, request("gone", sampling={"max_tokens": 50})))
        unread = async_engine.take([request("unread", sampling={"max_tokens": 50})])
        outputs = outputs_of(async_engine, request("bad"), request("good", sampling={"max_tokens": 50}))
        answer = asyncio.create_task(anext(outputs))
        await runner.wait_until_entered()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        while not (unread.is_over and answer.done()):
            runner.let_through(1)
            await runner.wait_until_entered()  # "good" goes on, and no step runs ahead of who reads
        assert (await answer).finish_reason is not None
        await outputs.aclose()
        runner.open_for_good()
        await settle(async_engine)

    with_started(test, engine, load=LoadLimits(max_unread_outputs=2))
    assert end_of(engine, "gone") == ("abort", "client_gone")
    assert end_of(engine, "unread") == ("abort", "slow_reader")
    assert end_of(engine, "good") == ("abort", "another_choice_failed")
    assert end_of(engine, "bad") == ("error", None)


def test_who_was_at_the_head_and_is_passed_waits_for_the_policy():
    engine = timed(max_num_seqs=1, policy="priority")
    engine.add_request("runs", ids("runs"), SamplingParams(max_tokens=9), priority=0)
    engine.step()
    engine.add_request("waits", ids("waits"), SamplingParams(max_tokens=1), priority=2)
    engine.step()
    engine.add_request("passes", ids("passes"), SamplingParams(max_tokens=1), priority=1)
    engine.step()
    on = [(each.numbers.on, each.step) for each in engine.timelines.get("waits").entries if each.event == "blocked"]
    assert on == [("slots", 1), ("policy", 2)]
    assert engine.timelines.places() == {"passes": 0, "waits": 1}
