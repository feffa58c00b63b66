"""How many threads run, and that they share out the items of a phase without losing or repeating one."""

import threading
import time

import numba
import numpy as np
import pytest
from numba import njit

from millpond.errors import ConfigError
from millpond.kernels import threads
from millpond.kernels.threads import (
    CACHE_LINE,
    new_sync,
    phases_walked,
    shared_items,
    start_phases,
    thread_count,
    time_phases,
)

# those in use have no way in from Python
enter, leave, share_of, take = (
    njit(each.py_func, nogil=True) for each in (threads.enter, threads.leave, threads.share_of, threads.take)
)


@pytest.fixture(autouse=True)
def same_team_afterwards():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


def test_an_explicit_number_of_threads_wins():
    assert thread_count(1) == 1
    assert thread_count(numba.config.NUMBA_NUM_THREADS) == numba.config.NUMBA_NUM_THREADS


def test_without_a_setting_there_is_one_thread_for_each_usable_core(monkeypatch):
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 16)
    monkeypatch.setattr(threads, "usable_cores", lambda: 5)
    assert thread_count(None) == 5


def test_there_are_never_more_threads_than_numba_may_start(monkeypatch):
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 3)
    monkeypatch.setattr(threads, "usable_cores", lambda: 64)
    assert thread_count(None) == 3


def test_more_threads_than_may_be_started_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 3)
    with pytest.raises(ConfigError, match="threads is 9, but this process may start at most 3"):
        thread_count(9)


@njit(nogil=True)
def walk(sync, thread, taken, seen):
    """One thread's way through taken.shape[0] phases: count what it takes; after each, how many items are done."""
    phases, items = taken.shape
    for phase in range(phases):
        for item in shared_items(sync, thread, items):
            taken[phase, item] += 1
        seen[phase] = taken[phase].sum()


@pytest.mark.parametrize(("team", "items"), [(1, 53), (2, 53), (2, 1), (3, 2), (3, 301)])
def test_every_item_of_every_phase_is_taken_once_and_done_before_anyone_goes_on(team, items):
    phases = 40
    sync = new_sync(team)
    sync[:, :2] = -1  # leftovers of a step before
    start_phases(sync)
    taken, seen = np.zeros((phases, items), np.int64), np.zeros((team, phases), np.int64)
    walkers = [threading.Thread(target=walk, args=(sync, i, taken, seen[i])) for i in range(team)]
    for walker in walkers:
        walker.start()
    for walker in walkers:
        walker.join()
    np.testing.assert_array_equal(taken, 1)
    np.testing.assert_array_equal(seen, items)


@pytest.mark.parametrize("late", [0, 1])
def test_a_thread_that_comes_late_finds_nothing_to_do_and_holds_nobody_back(late):
    sync, taken = new_sync(2), np.zeros((3, 5), np.int64)
    seen = np.zeros((2, 3), np.int64)
    walk(sync, 1 - late, taken, seen[0])
    walk(sync, late, taken, seen[1])
    np.testing.assert_array_equal(taken, 1)
    np.testing.assert_array_equal(seen, 5)


def test_a_phase_is_not_over_before_the_items_that_another_thread_took_are_done():
    sync, over = new_sync(2), threading.Event()
    phase = enter(sync, 0, 3)
    assert take(sync, 0, phase, share_of(sync, 0, 3)[1], 1) == 0
    taken, seen = np.zeros((1, 3), np.int64), np.zeros(1, np.int64)

    def others():
        walk(sync, 1, taken, seen)
        over.set()

    waiting = threading.Thread(target=others)
    waiting.start()
    assert not over.wait(0.05)
    leave_soon = threading.Thread(target=leave, args=(sync, 0, 1))
    leave_soon.start()
    leave_soon.join()
    waiting.join()
    assert over.is_set()
    assert taken.tolist() == [[0, 1, 1]]


@pytest.mark.parametrize(("team", "items"), [(1, 7), (2, 7), (3, 2), (4, 100)])
def test_the_shares_of_a_phase_are_all_its_items_side_by_side(team, items):
    sync, end = new_sync(team), 0
    for thread in range(team):
        first, count = share_of(sync, thread, items)
        assert first == end
        assert count in (items // team, items // team + 1)
        end = first + count
    assert end == items


def test_what_two_threads_write_does_not_share_a_cache_line():
    sync = new_sync(3)
    for thread in range(3):
        phase = enter(sync, thread, 6)
        take(sync, thread, phase, 2, 1)
    assert (np.flatnonzero(sync.reshape(-1)) // CACHE_LINE).tolist() == [1, 2, 3, 4, 4, 5, 5, 6, 6]


def clock() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def nanoseconds(readings):
    return (readings[:, 0] * 1_000_000_000 + readings[:, 1]).tolist()


def test_a_timed_step_notes_when_it_began_and_when_each_phase_was_over():
    sync, taken, readings = new_sync(2), np.zeros((5, 7), np.int64), np.zeros((6, 2), np.int64)
    time_phases(sync, readings)
    for _ in range(2):  # the second step's readings are its own
        readings[:], before = 0, clock()
        start_phases(sync)
        walk(sync, 1, taken, np.zeros(5, np.int64))
        times = [before, *nanoseconds(readings), clock()]
        assert times == sorted(times)
        assert phases_walked(sync) == 5


def test_a_phase_is_over_when_the_first_thread_sees_it():
    sync, readings = new_sync(2), np.zeros((2, 2), np.int64)
    time_phases(sync, readings)
    start_phases(sync)
    enter(sync, 0, 0)
    leave(sync, 0, 0)
    first = readings[1].tolist()
    assert first > [0, 0]
    enter(sync, 1, 0)
    leave(sync, 1, 0)
    assert readings[1].tolist() == first


def test_no_clock_is_read_where_phases_are_not_timed():
    sync, taken, readings = new_sync(1), np.zeros((5, 7), np.int64), np.zeros((6, 2), np.int64)
    time_phases(sync, readings)
    time_phases(sync, None)
    start_phases(sync)
    walk(sync, 0, taken, np.zeros(5, np.int64))
    assert not readings.any()
