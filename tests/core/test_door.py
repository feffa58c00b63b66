"""The door's boundary, from every side. The rules for a prompt of L tokens are one table:

L + max_tokens <= max_model_len, and blocks_for_length(L + max_tokens - 1) <= num_blocks.
"""

import pytest

from helpers import Loop, make_request, make_scheduler
from millpond.core.door import Door
from millpond.errors import InvalidRequestError

LIMIT = 16


def refusal(scheduler, *args):
    with pytest.raises(InvalidRequestError) as refused:
        scheduler.add_request(make_request("a", *args))
    assert not scheduler.has_work
    return refused.value


@pytest.mark.parametrize(
    ("length", "max_tokens", "message", "param"),
    [
        (LIMIT - 1, 1, None, None),
        (LIMIT - 1, 2, "together 17, more than max_model_len 16; max_tokens can be at most 1", "max_tokens"),
        (LIMIT - 1, 0, "max_tokens must be at least 1, got 0", "max_tokens"),
        (LIMIT, 1, "16 tokens, which leaves no room for one new token within max_model_len 16", "prompt"),
        (LIMIT, 0, "16 tokens, which leaves no room for one new token within max_model_len 16", "prompt"),
        (LIMIT + 1, 1, "17 tokens, more than max_model_len 16", "prompt"),
        (LIMIT + 1, 0, "17 tokens, more than max_model_len 16", "prompt"),
        (0, 1, "the prompt is empty", "prompt"),
    ],
)
def test_the_context_limit_at_its_boundary(length, max_tokens, message, param):
    scheduler = make_scheduler(num_blocks=100, max_model_len=LIMIT)
    if message is None:
        scheduler.add_request(make_request("a", length, max_tokens))
    else:
        error = refusal(scheduler, length, max_tokens)
        assert message in str(error)
        assert error.param == param


@pytest.mark.parametrize(
    ("length", "message"),
    [(LIMIT - 1, None), (LIMIT, "leaves no room for one new token"), (LIMIT + 1, "more than max_model_len 16")],
)
def test_an_unset_max_tokens_is_capped_or_refused_for_the_prompt(length, message):
    scheduler = make_scheduler(num_blocks=100, max_model_len=LIMIT)
    cap = scheduler.door.max_tokens_that_fit(length)
    if message is None:
        scheduler.add_request(make_request("a", length, cap))
    else:
        assert message in str(refusal(scheduler, length, cap))


def test_a_prompt_that_fills_the_pool_is_taken_when_max_tokens_is_1():
    loop = Loop(make_scheduler(num_blocks=4))
    loop.add(make_request("a", 16, 1))
    assert loop.run() == 2


def test_a_prompt_that_fills_the_pool_is_refused_when_max_tokens_is_2():
    error = refusal(make_scheduler(num_blocks=4), 16, 2)
    assert "that needs 5 blocks of 4 tokens and the pool has 4; max_tokens can be at most 1" in str(error)


def test_a_prompt_longer_than_the_pool_is_refused_for_its_length():
    error = refusal(make_scheduler(num_blocks=4), 17, 1)
    assert "the prompt has 17 tokens: that needs 5 blocks of 4 tokens and the pool has 4" in str(error)
    assert error.param == "prompt"


@pytest.mark.parametrize("reserve", [0, 3])
@pytest.mark.parametrize("length", range(1, 17))
def test_what_passes_the_door_at_its_exact_boundary_runs_alone(length, reserve):
    scheduler = make_scheduler(num_blocks=4, reserve=reserve)
    most = scheduler.door.max_tokens_that_fit(length)
    assert f"at most {most} for" in str(refusal(scheduler, length, most + 1))
    loop = Loop(scheduler)
    loop.add(make_request("a", length, most))
    assert loop.run() == most + 1
    assert scheduler.counters.preemptions == 0


@pytest.mark.parametrize(
    ("length", "max_model_len", "most"),
    [(1, 100, 16), (16, 100, 1), (17, 100, 0), (40, 100, 0), (4, 10, 6), (10, 10, 0), (11, 10, 0)],
)
def test_the_cap_is_the_smaller_of_pool_and_context(length, max_model_len, most):
    assert Door(num_blocks=4, block_size=4, max_model_len=max_model_len).max_tokens_that_fit(length) == most


def test_an_id_in_use_is_refused_until_its_request_is_released():
    loop = Loop(make_scheduler())
    loop.add(make_request("a", 4, 1))
    with pytest.raises(InvalidRequestError, match="request id 'a' is already in use"):
        loop.add(make_request("a", 4, 1))
    loop.run()
    loop.add(make_request("a", 4, 1))
    assert loop.run() == 2
