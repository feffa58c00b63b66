from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest

from millpond.core.invariants import Auditor
from millpond.core.policies import Fcfs
from millpond.core.scheduler import Scheduler
from millpond.errors import InvariantError
from millpond.lab import world as lab
from millpond.lab.world import GOES_ON, Action, Case, World

CASE = Case(num_blocks=3, block_size=2, slots=2, reserve=0, budget=2, most_unfinished=3, most_drafts=1)


def everything(thing, depth=0):
    """All that an object holds, in values that compare: dicts and lists in order, objects by their fields."""
    if isinstance(thing, dict):
        return [(key, everything(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return [everything(value) for value in thing]
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = {name: getattr(thing, name) for name in slots} | getattr(thing, "__dict__", {})
    if type(thing).__module__.startswith("millpond") and not isinstance(thing, lab.ChosenDrafts):
        return type(thing).__name__, [(name, everything(value)) for name, value in sorted(fields.items())]
    return type(thing).__name__ if isinstance(thing, lab.ChosenDrafts | Fcfs) else repr(thing)


def walk(case, actions):
    """A world after taking, again and again, the action at these places of its list."""
    world = World.empty(case)
    for place in actions:
        choices = list(world.actions())
        world.do(choices[place % len(choices)])
    return world


WALKS = [walk for length in (3, 5, 9) for walk in itertools.islice(itertools.product((0, 3, 5, 11), repeat=length), 40)]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("places", WALKS[::6], ids=lambda places: "".join(f"{place:x}" for place in places))
def test_a_copy_holds_what_a_deep_copy_holds_and_shares_nothing_that_changes(places, policy):
    world = walk(replace(CASE, policy=policy), places)
    twin, deep = world.copy(), copy.deepcopy(world)
    assert everything(twin) == everything(deep) == everything(world)
    for action in world.actions():
        after = world.copy()
        after.do(action)
        assert everything(world) == everything(deep), action
    for action in itertools.islice(twin.actions(), 1):
        twin.do(action)
        assert everything(twin) != everything(world) == everything(deep)


def test_a_scheduler_with_a_field_that_nobody_knows_how_to_copy_is_refused():
    world = World.empty(CASE)
    world.scheduler.novelty = []
    with pytest.raises(InvariantError, match=r"no rule to copy \['novelty'\] of a scheduler"):
        world.copy()


def test_what_may_happen_to_an_empty_world_is_an_arrival_of_any_length():
    assert list(World.empty(CASE).actions()) == [Action("add", "a", (length,)) for length in range(1, 7)]


def test_no_more_requests_come_than_may_be_unfinished():
    world = World.empty(CASE)
    for name in "abc":
        world.do(Action("add", name, (1,)))
    assert [action.verb for action in world.actions()] == ["schedule"] * 4 + ["abort"] * 3
    world.do(Action("abort", "b"))
    assert Action("add", "d", (6,)) in world.actions()


def test_a_step_may_give_each_request_a_token_or_the_last_one_or_a_fault_or_fail():
    world = World.empty(Case(2, 1, 2, 0, None, 2))
    world.do(Action("add", "a", (1,)))
    world.do(Action("add", "b", (1,)))
    world.do(Action("schedule"))
    outcomes = [
        [ending for _, ending in action.outcomes] for action in world.actions() if action.verb in ("update", "fail")
    ]
    assert outcomes == [
        ["goes on", "goes on"],
        ["goes on", "stops"],
        ["stops", "goes on"],
        ["stops", "stops"],
        ["faults", "goes on"],
        ["goes on", "faults"],
        [],
    ]


def test_guesses_are_tried_in_every_number_and_are_right_in_every_number():
    world = World.empty(Case(4, 1, 1, 0, None, 1, most_drafts=2))
    world.do(Action("add", "a", (1,)))
    assert [action.numbers for action in world.actions() if action.verb == "schedule"] == [(0,), (1,), (2,)]
    world.do(Action("schedule", numbers=(2,)))
    outcomes = [action.outcomes[0] for action in world.actions() if action.verb == "update"]
    assert outcomes == [(n, ending) for ending in ("goes on", "stops") for n in range(3)] + [(0, "faults")]
    world.do(Action("update", outcomes=((1, "goes on"),)))
    (request,) = world.scheduler.running
    assert (request.num_output_tokens, request.num_computed_tokens, len(request.block_ids)) == (2, 2, 2)


def running_pair():
    """a and b after their first step, a block each."""
    world = World.empty(Case(4, 1, 2, 0, None, 2))
    for action in (Action("add", "a", (1,)), Action("add", "b", (1,)), Action("schedule")):
        world.do(action)
    world.do(next(world.actions()))
    return world, world.scheduler.requests["a"], world.scheduler.requests["b"]


def test_a_request_that_reads_the_k_v_of_another_is_seen():
    world, a, b = running_pair()
    a.block_ids, b.block_ids = b.block_ids, a.block_ids
    with pytest.raises(InvariantError, match=r"INV-6: request a reads the K/V of \(2001, \d+\), but has \(1001, \d+\)"):
        world.do(Action("schedule"))


def test_a_request_in_a_slot_that_the_runner_gave_to_another_is_seen():
    world, a, b = running_pair()
    a.slot, b.slot = b.slot, a.slot
    with pytest.raises(InvariantError, match="INV-6: request a runs in slot 1, where the runner has b"):
        world.do(Action("schedule"))


def test_a_decision_that_differs_between_two_equal_states_is_seen():
    flips = itertools.count()

    class Moody(Scheduler):
        def _reserve(self, head, need, taken):
            return next(flips) % 2

    world = World.empty(Case(1, 1, 1, 0, None, 1), Moody)
    world.do(Action("add", "a", (1,)))
    with pytest.raises(InvariantError, match="INV-8: step 0 decided"):
        world.do(Action("schedule"))


def test_an_auditor_goes_on_with_what_it_knew_in_the_copy(monkeypatch):
    world, a, _ = running_pair()
    twin = world.copy()
    twin.scheduler.requests["a"].output_token_ids[0] += 1
    assert a.output_token_ids == [lab.right_token(0, 1) + 1]
    with pytest.raises(InvariantError, match=r"INV-6: request a has output \[1004\], but was given \[1003\]"):
        twin.do(Action("schedule"))
    assert isinstance(twin.auditor, Auditor)
    world.do(Action("schedule"))


def done(*actions):
    world = World.empty(Case(2, 1, 2, 0, None, 2))
    for action in actions:
        world.do(action)
    return world


def test_a_victim_that_has_generated_is_in_another_state_than_a_newcomer_as_long():
    ends = Action("update", outcomes=((0, "stops"),))
    both_go_on = Action("update", outcomes=((0, "goes on"),) * 2)
    two = Action("add", "a", (1,)), Action("add", "b", (1,)), Action("schedule"), both_go_on
    victim = done(*two, Action("schedule"), ends)
    newcomer = done(Action("add", "a", (2,)), Action("schedule"), Action("add", "b", (2,)), ends)
    for world in (victim, newcomer):
        (waiting,) = world.scheduler.waiting.values()
        assert (waiting.num_tokens, world.scheduler.num_running, world.scheduler.pool.num_free) == (2, 0, 0)
    assert victim.key() != newcomer.key()


def test_names_go_on_behind_z():
    assert [lab.name_of(arrival) for arrival in (0, 25, 26, 53)] == ["a", "z", "a1", "b2"]


def test_a_schedule_has_the_guesses_that_it_was_given_where_the_disk_is_not_asked():
    world = World.empty(Case(6, 1, 1, 0, None, 1, most_drafts=2, prefix_cache=True, disk=True))
    world.do(Action("add", "a", (1,)))
    world.do(Action("schedule", numbers=(1, 0)))
    world.do(Action("update", outcomes=((0, GOES_ON),)))
    steps = [action for action in world.actions() if action.verb == "schedule"]
    assert {action.numbers[-1] for action in steps} == {0, 1, 2}
    for action in steps:
        after = world.copy()
        after.do(action)
        assert after.in_flight.scheduled[0].num_drafts == action.numbers[-1], action
