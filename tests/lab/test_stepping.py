from __future__ import annotations

import pytest

from helpers import make_request, make_scheduler
from millpond.core.invariants import Auditor
from millpond.errors import InvariantError
from millpond.lab.stepping import CHECKSUM_TOKENS, ChecksumRunner, StepLoop


def outputs(*requests, **sizes):
    """Each request's tokens, and the runner that made them."""
    loop = StepLoop(make_scheduler(**sizes), ChecksumRunner())
    for request in requests:
        loop.scheduler.add_request(request)
    while loop.scheduler.has_work:
        loop.step()
    return [request.output_token_ids for request in requests], loop


def test_a_preempted_request_gets_the_tokens_it_would_have_had_alone():
    requests = [make_request(f"r{index}") for index in range(8)]
    crowd, loop = outputs(*requests, num_blocks=8, slots=3)
    assert loop.scheduler.counters.preemptions == 4
    assert crowd == [outputs(make_request(f"r{index}"))[0][0] for index in range(8)]


def test_chunks_change_no_token():
    assert outputs(make_request("a", 11), budget=4)[0] == outputs(make_request("a", 11))[0]


def test_every_token_of_the_prompt_counts():
    (one, other), _ = outputs(a := make_request("a", 6), b := make_request("b", 6))
    assert one != other
    assert all(0 <= token_id < CHECKSUM_TOKENS for token_id in one + other)
    changed = make_request("a", 6)
    changed.prompt_token_ids = (*a.prompt_token_ids[:-1], b.prompt_token_ids[-1])
    assert outputs(changed)[0][0] != one


def test_the_clock_counts_the_steps_that_forwarded():
    _, loop = outputs(make_request("a", 6, 10))
    assert loop.scheduler.counters.iterations == 11  # the last one only releases
    assert loop.runner.clock() == 10.0


def test_an_auditor_sees_every_step():
    scheduler = make_scheduler()
    loop = StepLoop(scheduler, ChecksumRunner(), Auditor(scheduler))
    scheduler.add_request(request := make_request("a"))
    loop.step()
    request.output_token_ids[0] += 1
    with pytest.raises(InvariantError, match="INV-6"):
        loop.step()
