from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import Loop, expected_output, make_request
from millpond.core.block_pool import blocks_for_length
from millpond.core.request import FinishReason, Request
from millpond.core.reserve import RECHECK, WINDOW, AutoReserve, FixedReserve, make_reserve
from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError

SIZE = 4


def running_request(name: str, prompt: int, output: int) -> Request:
    request = Request(name, (0,) * prompt, 1 << 20, output_token_ids=[0] * output)
    request.block_ids = list(range(blocks_for_length(prompt + output, SIZE)))
    return request


def taught(lengths, num_blocks: int = 64) -> AutoReserve:
    reserve = AutoReserve(num_blocks, SIZE)
    for length in lengths:
        reserve.note_end(length)
    return reserve


def chosen(reserve: AutoReserve, running, prompt: int = 4, num_free: int | None = None) -> int:
    head = running_request("head", prompt, 0)
    need, held = len(head.block_ids), sum(len(each.block_ids) for each in running)
    free = reserve.num_blocks - held if num_free is None else num_free
    return reserve.choose(head, need, need, free, running)


def crowd(count: int, output: int) -> list[Request]:
    return [running_request(f"r{index}", 4, output) for index in range(count)]


def test_it_holds_back_what_equal_outputs_will_need_and_no_more():
    # Each of five grows from 4 + 20 tokens to at most 4 + 40, which the newcomer has not reached by then.
    reserve = chosen(taught([40] * WINDOW), crowd(5, 20))
    own, grown = blocks_for_length(20, SIZE), 5 * (blocks_for_length(44, SIZE) - blocks_for_length(24, SIZE))
    assert grown <= reserve <= grown + own + 3


def test_who_is_about_to_end_needs_no_room():
    near, far = (chosen(taught([40] * WINDOW), crowd(5, output)) for output in (38, 4))
    assert near < far


def test_it_forgets_the_traffic_of_before():
    assert chosen(taught([200] * 500 + [8] * WINDOW), crowd(5, 4)) == chosen(taught([8] * WINDOW), crowd(5, 4))
    assert chosen(taught([200] * 500 + [8] * WINDOW), crowd(5, 4)) < chosen(taught([200] * WINDOW), crowd(5, 4))


def test_a_longer_prompt_wants_more_certainty():
    spread = [4, 60] * (WINDOW // 2)
    held = blocks_for_length(40, SIZE) - blocks_for_length(4, SIZE)
    assert chosen(taught(spread), crowd(8, 1), prompt=40) + held > chosen(taught(spread), crowd(8, 1), prompt=4)


def test_before_anything_ended_it_expects_growth_and_more_of_who_has_come_far():
    young, old = (chosen(AutoReserve(256, SIZE), crowd(5, output)) for output in (4, 100))
    assert 0 < young < old


def test_blocks_that_are_shared_count_once():
    own = crowd(5, 20)
    alone = chosen(taught([40] * WINDOW), own, num_free=64 - 30)
    shared = chosen(taught([40] * WINDOW), own, num_free=64 - 10)  # 30 places in tables, 10 blocks
    assert abs(shared - alone) <= 5


def test_nobody_running_nothing_held_back_even_if_much_was_before():
    reserve = taught([200] * WINDOW)
    assert chosen(reserve, crowd(3, 20)) > 0
    assert (chosen(reserve, []), reserve.blocks) == (0, 0)


def test_a_refusal_holds_for_some_steps_unless_an_output_ends():
    reserve, looks = taught([60] * WINDOW, 40), []
    look = reserve._peak
    reserve._peak = lambda *arguments: looks.append(1) or look(*arguments)
    choices = {chosen(reserve, crowd(5, 10)) for _ in range(2 * RECHECK)}
    assert (len(choices), len(looks)) == (1, 2)
    chosen(reserve, crowd(5, 10))
    reserve.note_end(60)
    chosen(reserve, crowd(5, 10))
    assert len(looks) == 4


def test_a_refusal_keeps_its_own_blocks_whoever_is_asked_about_in_between():
    reserve = taught([60] * WINDOW, 40)
    refused = chosen(reserve, crowd(5, 10))
    assert refused > 0
    assert reserve.choose(running_request("other", 4, 0), 1, 1, 40, []) == 0  # who is let in
    assert (chosen(reserve, crowd(5, 10)), reserve.blocks) == (refused, refused)


def test_a_roomy_pool_needs_no_forecast(monkeypatch):
    monkeypatch.setattr(AutoReserve, "_peak", lambda *arguments: pytest.fail("looked ahead"))
    assert chosen(taught([40] * WINDOW, 1000), crowd(5, 20)) == 0


@pytest.mark.parametrize(
    ("watermark", "watermark_blocks", "blocks"),
    [(0.05, None, 3), (0.05, 7, 7), (0.05, 0, 0), ("auto", 7, 7)],
)
def test_a_fixed_reserve_is_made_of_a_share_or_of_blocks_which_win(watermark, watermark_blocks, blocks):
    reserve = make_reserve(64, SIZE, watermark, watermark_blocks)
    assert (type(reserve), reserve.blocks) == (FixedReserve, blocks)


def test_auto_makes_one_that_learns_and_begins_with_nothing():
    reserve = make_reserve(64, SIZE, "auto")
    assert (type(reserve), reserve.blocks, reserve.num_blocks, reserve.block_size) == (AutoReserve, 0, 64, SIZE)


@pytest.mark.parametrize("watermark", [0.05, "auto"])
def test_a_reserve_that_the_pool_cannot_hold_is_refused(watermark):
    with pytest.raises(ConfigError, match="below the 64 blocks of the pool, got 64"):
        make_reserve(64, SIZE, watermark, 64)


@given(
    lengths=st.lists(st.integers(1, 3000), max_size=150),
    running=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), max_size=8),
    prompt=st.integers(1, 120),
    spare=st.integers(0, 60),
)
@settings(max_examples=60, deadline=None)
def test_whatever_it_has_seen_it_stays_within_its_bounds_and_decides_the_same_twice(lengths, running, prompt, spare):
    requests = [running_request(f"r{index}", *each) for index, each in enumerate(running)]
    held, need = sum(len(each.block_ids) for each in requests), blocks_for_length(prompt, SIZE)
    num_blocks = max(held + spare, need)
    one, other = taught(lengths, num_blocks), taught(lengths, num_blocks)
    reserve = chosen(one, requests, prompt)
    assert reserve == chosen(other, requests, prompt) == one.blocks
    assert 0 <= reserve <= min(num_blocks * 7 // 8, num_blocks - need)
    assert requests or reserve == 0


def scheduler_of(num_blocks: int, prefix_cache: bool = False, budget: int | None = None) -> Scheduler:
    return Scheduler(
        num_blocks=num_blocks,
        block_size=SIZE,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        max_model_len=64,
        watermark_blocks=0,
        reserve=AutoReserve(num_blocks, SIZE),
        prefix_cache=prefix_cache,
    )


@given(
    work=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 34), st.integers(0, 20)), min_size=1, max_size=30),
    prefix_cache=st.booleans(),
    budget=st.sampled_from([None, 6, 16]),
    aborts=st.sets(st.integers(0, 29), max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_every_invariant_holds_everyone_finishes_and_no_answer_changes(work, prefix_cache, budget, aborts):
    loop = Loop(scheduler_of(16, prefix_cache, budget))
    scheduler, requests = loop.scheduler, []
    coming = sorted(work, key=lambda each: each[2])
    step = 0
    while coming or scheduler.has_work:
        while coming and coming[0][2] <= step:
            prompt, output, _ = coming.pop(0)
            requests.append(Request(f"r{len(requests)}", (len(requests) % 3,) * prompt, output))
            loop.add(requests[-1])
        if step in aborts and scheduler.waiting:
            loop.abort(next(reversed(scheduler.waiting)))
        loop.step()
        step += 1
        assert step < len(work) * 64 + 50
    assert scheduler.pool.num_free == 16
    for request in requests:
        if request.finish_reason is not FinishReason.ABORT:
            assert request.output_token_ids == expected_output(request.prompt_token_ids, request.max_tokens)


def test_the_scheduler_tells_it_of_outputs_that_ended_and_of_no_others():
    scheduler, noted = scheduler_of(16), []
    scheduler.reserve.note_end = noted.append
    for name, max_tokens in (("a", 3), ("b", 9), ("c", 9), ("d", 9)):
        scheduler.add_request(make_request(name, 4, max_tokens))
    loop = Loop(scheduler)
    loop.steps(5)
    scheduler.abort("b")
    scheduler.fail(["c"], "broken")
    loop.run()
    assert noted == [3, 9]


def test_the_scheduler_shows_the_newest_choice():
    scheduler = scheduler_of(16)
    for index in range(6):
        scheduler.add_request(make_request(f"r{index}", 8, 12))
    Loop(scheduler).step()
    assert scheduler.watermark_blocks == scheduler.reserve.blocks > 0
    assert scheduler.counters.watermark_delays == 1


def test_a_forecast_costs_less_than_the_step_it_is_for():
    reserve = AutoReserve(4096, 16)
    for length in range(WINDOW):
        reserve.note_end(8 * length)
    requests = [Request(f"r{index}", (0,) * 100, 999, output_token_ids=[0] * (5 * index)) for index in range(64)]
    for each in requests:
        each.block_ids = list(range(blocks_for_length(each.num_tokens, 16)))
    head = Request("head", (0,) * 100, 999)

    def least_seconds(work) -> float:
        best = 1.0
        for _ in range(20):
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
        return best

    def forecast():
        reserve._peak(head, 7, 7, 2000, requests)

    def yardstick():
        sum([index * index for index in range(64 * 1000)])

    assert least_seconds(forecast) < least_seconds(yardstick)
