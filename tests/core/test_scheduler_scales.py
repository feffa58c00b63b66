"""Counted work: a step costs what it schedules, whoever waits, and no more for each request when there are more."""

import sys
from contextlib import contextmanager

import pytest

from helpers import make_request, make_scheduler
from millpond.core.request import Request
from millpond.core.step import SampledTokens, StepResult

STOP = 9


class Watched(Request):
    """A request whose comparisons are Python and so are counted: a search through a list shows."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


@contextmanager
def counted_calls():
    """How many Python functions were called inside, in a list of one."""
    count = [0]

    def profile(frame, event, _):
        count[0] += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(before)


@contextmanager
def counted():
    """How many bytecodes ran inside, in a list of one."""
    count = [0]

    def trace(frame, event, _):
        frame.f_trace_opcodes = True
        count[0] += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def crowd(num_running, num_waiting, blocks_each):
    """num_running requests of 4 tokens that have each sampled one more and hold one block of 4, and others behind."""
    scheduler = make_scheduler(num_blocks=num_running * blocks_each, slots=num_running)
    for index in range(num_running + num_waiting):
        prompt = make_request(f"r{index}", 4).prompt_token_ids
        scheduler.add_request(Watched(f"r{index}", prompt, 16, stop_token_ids=frozenset({STOP})))
    finish(scheduler, scheduler.schedule())
    assert (scheduler.num_running, scheduler.num_waiting) == (num_running, num_waiting)
    return scheduler


def finish(scheduler, output, stops=()):
    samples = [
        SampledTokens(each.request_id, (STOP if index in stops else 7,)) for index, each in enumerate(output.scheduled)
    ]
    scheduler.update(StepResult(tuple(samples)))


def decode(num_running, num_waiting):
    scheduler = crowd(num_running, num_waiting, blocks_each=8)
    with counted() as count:
        for _ in range(4):
            finish(scheduler, scheduler.schedule())
    assert (scheduler.num_running, scheduler.num_waiting) == (num_running, num_waiting)
    return count[0]


def end_of_the_younger_half(num_running, num_waiting):
    scheduler = crowd(num_running, num_waiting, blocks_each=8)
    output = scheduler.schedule()
    with counted() as count:
        finish(scheduler, output, range(num_running // 2, num_running))
        output = scheduler.schedule()
    assert len(output.released) == len(output.admitted) == num_running // 2
    return count[0]


def preemption_of_the_younger_half(num_running, num_waiting):
    scheduler = crowd(num_running, num_waiting, blocks_each=1)
    with counted() as count:
        output = scheduler.schedule()
    assert len(output.preempted) == num_running // 2
    return count[0]


STEPS = [decode, end_of_the_younger_half, preemption_of_the_younger_half]


@pytest.mark.parametrize("step", STEPS)
def test_the_work_of_a_step_grows_no_faster_than_the_running_set(step):
    assert step(256, 300) <= 4.05 * step(64, 300)


@pytest.mark.parametrize("step", STEPS)
def test_the_work_of_a_step_is_the_same_with_ten_thousand_waiting(step):
    assert step(64, 10_000) == step(64, 100)


def calls_of_a_decode_step(num_running):
    scheduler = crowd(num_running, 10, blocks_each=8)
    finish(scheduler, scheduler.schedule())  # all have room for three more tokens now
    with counted_calls() as count:
        output = scheduler.schedule()
    samples = tuple(SampledTokens(each.request_id, (7,)) for each in output.scheduled)
    with counted_calls() as more:
        scheduler.update(StepResult(samples))
    return count[0] + more[0]


def test_one_more_that_decodes_is_seven_calls_more():
    # Its length to grow and to plan, its share, the share's tokens and record; to take the token in, and what it got.
    assert (calls_of_a_decode_step(96) - calls_of_a_decode_step(64)) / 32 <= 7
