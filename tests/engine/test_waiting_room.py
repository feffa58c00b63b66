from __future__ import annotations

import pytest

from millpond.config import LoadLimits
from millpond.engine.waiting_room import WaitingRoom
from millpond.errors import ConfigError, InvalidRequestError, OverloadedError


def room(requests=2, tokens=100, slots=3):
    return WaitingRoom(LoadLimits(max_waiting_requests=requests, max_waiting_tokens=tokens), slots)


def enter(room, *names, tokens=10):
    room.enter(0.0, dict.fromkeys(names, tokens))


def fits(room, num_requests=1, num_tokens=10, slots_are_free=True):
    """True, or the bound that it meets."""
    try:
        room.check(0.0, num_requests, num_tokens, slots_are_free=slots_are_free)
    except OverloadedError as error:
        return error.bound
    return True


def test_the_queue_takes_its_bound_beside_the_free_slots_and_no_more():
    queue = room(requests=2, slots=3)
    for number in range(5):
        assert fits(queue) is True
        enter(queue, str(number))
    assert fits(queue) == "requests"


def test_who_is_inside_takes_a_slot_and_gives_it_back():
    queue = room(requests=0, slots=1)
    enter(queue, "a")
    assert fits(queue) == "requests"
    queue.admit(["a"])
    assert (queue.num_waiting, fits(queue)) == (0, "requests")
    queue.leave(["a"])
    assert fits(queue) is True


def test_a_slot_that_nobody_can_use_is_no_room():
    queue = room(requests=1, slots=3)
    enter(queue, "a")
    assert fits(queue, slots_are_free=True) is True
    assert fits(queue, slots_are_free=False) == "requests"


def test_prompt_tokens_are_counted_while_they_wait():
    queue = room(requests=9, tokens=100)
    enter(queue, "a", tokens=60)
    assert fits(queue, num_tokens=40) is True
    assert fits(queue, num_tokens=41) == "tokens"
    queue.admit(["a"])
    assert (queue.num_waiting_tokens, fits(queue, num_tokens=41)) == (0, True)


def test_who_leaves_while_waiting_takes_its_tokens_along_once():
    queue = room(requests=9, tokens=100)
    enter(queue, "a", "b", tokens=50)
    for _ in range(2):
        queue.leave(["a"])
        queue.admit(["a"])
    assert (queue.num_waiting, queue.num_waiting_tokens) == (1, 50)
    assert fits(queue, num_tokens=50) is True
    assert fits(queue, num_tokens=51) == "tokens"


def test_a_prompt_longer_than_all_that_may_wait_is_let_into_an_empty_queue_only():
    queue = room(tokens=100)
    assert fits(queue, num_tokens=101) is True
    enter(queue, "a", tokens=1)
    assert fits(queue, num_tokens=101) == "tokens"


def test_a_list_is_let_in_whole_or_not_at_all():
    queue = room(requests=2, slots=3)
    enter(queue, "a", "b")
    assert fits(queue, num_requests=3) is True
    assert fits(queue, num_requests=4) == "requests"


@pytest.mark.parametrize(("num_requests", "num_tokens", "numbers"), [(6, 6, ("6", "5")), (2, 101, ("101", "100"))])
def test_a_list_that_no_empty_queue_could_take_is_the_callers_mistake(num_requests, num_tokens, numbers):
    with pytest.raises(InvalidRequestError) as caught:
        room(requests=2, slots=3, tokens=100).check(0.0, num_requests, num_tokens, slots_are_free=True)
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_waiting_requests": -1},
        {"max_waiting_tokens": 1.5},
        {"request_timeout": 0},
        {"queue_timeout": float("nan")},
        {"stuck_after": float("inf")},
        {"stuck_after": True},
        {"max_unread_outputs": 0},
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=name):
        LoadLimits(**setting)
