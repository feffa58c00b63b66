from __future__ import annotations

import copy
from collections import deque

import pytest

from millpond.core.invariants import Auditor
from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError
from millpond.lab import explorer
from millpond.lab.explorer import Explorer
from millpond.lab.faults import WithoutWaiver
from millpond.lab.world import Case, World


def keys_by_brute_force(case, most_actions):
    """Every state within so many actions: deep copies, and nothing merged that was reached in another way."""
    keys = set()
    queue = deque([(World.empty(case), 0)])
    while queue:
        world, depth = queue.popleft()
        keys.add((0, world.key()))
        for action in world.actions() if depth < most_actions else ():
            after = copy.deepcopy(world)
            after.do(action)
            queue.append((after, depth + 1))
    return keys


@pytest.mark.parametrize(
    ("case", "most_actions"),
    [
        (Case(2, 1, 2, 0, None, 2), 5),
        (Case(1, 2, 1, 0, 1, 1), 8),
        (Case(2, 1, 1, 1, None, 1, most_drafts=1), 7),
        (Case(2, 1, 1, 0, None, 1, prefix_cache=True), 6),
        (Case(1, 2, 1, 0, 1, 1, prefix_cache=True), 6),
        (Case(2, 1, 1, 0, None, 2, policy="priority"), 5),
        (Case(2, 1, 2, 0, None, 2, policy="fair"), 4),
    ],
    ids=str,
)
def test_merging_states_loses_none(case, most_actions):
    bounded = Explorer([case], most_actions=most_actions)
    assert bounded.run().finding is None
    assert bounded.keys() == keys_by_brute_force(case, most_actions)


def test_two_cases_are_explored_side_by_side_and_not_mixed_up():
    one, other = Case(2, 1, 1, 0, None, 2), Case(2, 1, 2, 1, None, 1)
    both = Explorer([one, other]).run()
    alone = [Explorer([case]).run() for case in (one, other)]
    assert both.num_states == sum(each.num_states for each in alone)
    assert both.num_transitions == sum(each.num_transitions for each in alone)
    assert both.longest_drain == max(each.longest_drain for each in alone)


def test_one_request_and_one_position_are_what_they_are_counted_by_hand():
    """What ended holds a block, holds nothing, or there is none that ended; the next request is there or not.

    At rest these are 6 states. In flight: the request runs (1), it ended there (2), the step only released (4).
    """
    explored = Explorer([Case(1, 1, 1, 0, None, 1)]).run()
    at_rest = 1 + 5 * 2  # empty: an arrival; else a step, and an arrival or an abort
    in_flight = (
        5 + 2 * 3 + 4 * 2
    )  # it goes on, stops, faults, fails, is aborted; a result, a failure, ...; a result, ...
    assert (explored.num_states, explored.num_transitions, explored.longest_drain) == (13, at_rest + in_flight, 2)


def test_a_circle_of_steps_is_found_without_the_auditor_and_its_shortest_trace_is_given(monkeypatch):
    monkeypatch.setattr(Auditor, "_check_progress", lambda self, output: None)
    found = Explorer([Case(2, 1, 1, 1, None, 1)], WithoutWaiver).run().finding
    assert found.message == "INV-7: steps alone come back to this state"
    assert [(action.verb, action.numbers) for action in found.trace] == [("add", (2,))]


def test_a_bound_on_the_actions_ends_the_search_in_front_of_a_finding():
    cases = [Case(2, 1, 1, 1, None, 1)]
    assert Explorer(cases, WithoutWaiver, most_actions=1).run().finding is None
    assert len(Explorer(cases, WithoutWaiver, most_actions=2).run().finding.trace) == 2


def test_the_shortest_trace_of_all_cases_is_found_whichever_comes_first():
    class StuckAtThree(Scheduler):
        def _reserve(self, head, need, taken):
            return 9 if need == 3 else 0

    roomy, tight = Case(4, 1, 1, 0, None, 1, longest_prompt=1), Case(4, 1, 1, 0, None, 1)
    for cases in ([roomy, tight], [tight, roomy]):
        found = Explorer(cases, StuckAtThree).run().finding
        assert (found.case, [action.numbers for action in found.trace]) == (tight, [(3,), ()])


def test_more_states_than_memory_is_meant_for_end_the_search_with_what_to_do(monkeypatch):
    case = Case(2, 1, 2, 0, None, 2)
    whole = Explorer([case]).run().num_states
    monkeypatch.setattr(explorer, "MOST_STATES", whole - 1)
    with pytest.raises(ConfigError, match=rf"more than {whole - 1} states, .*smaller bounds \(--positions"):
        Explorer([case]).run()
    monkeypatch.setattr(explorer, "MOST_STATES", whole)
    assert Explorer([case]).run().num_states == whole
