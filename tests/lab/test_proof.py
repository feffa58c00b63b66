from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.core.invariants import Auditor
from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError
from millpond.lab import proof as proof_module
from millpond.lab.explorer import Explorer, Finding
from millpond.lab.faults import DISK_FAULTS, FAULTS, SHARING_FAULTS, PlantedFault, WithoutWaiver, planted_in
from millpond.lab.proof import MOST, ORDERING, Bounds, as_json, find, num_cases, prove
from millpond.lab.story import tell
from millpond.lab.world import Action, Case

SMALL = Bounds(positions=3, slots=2, requests=2, budget=1, guesses=1)
FAULT = {fault.name: fault for fault in FAULTS}


def quiet(name):
    pass


def test_the_scheduler_holds_within_small_bounds_and_each_pool_drains_in_its_time():
    names = []
    proof = prove(SMALL, names.append)
    assert (proof.finding, proof.as_json()["verdict"]) == (None, "holds")
    assert [(row.num_blocks, row.block_size) for row in proof.rows] == [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3)]
    for row in proof.rows:
        # With one slot, two requests of all the pool's positions run one after the other, and one step releases.
        assert row.longest_drain == 2 * row.num_blocks * row.block_size + 1
        # One or two slots, each reserve, a budget or none, guesses or none.
        assert row.num_cases == 2 * row.num_blocks * 2 * 2
    assert len(names) == num_cases(SMALL) == sum(row.num_cases for row in proof.rows)
    assert proof.num_states == sum(row.num_states for row in proof.rows) > 3_000
    assert proof.num_transitions == sum(row.num_transitions for row in proof.rows) > 4 * proof.num_states


ANY_RESERVE = replace(SMALL, any_reserve=True)


def test_the_rules_hold_whatever_a_reserve_chooses_and_that_covers_every_fixed_one():
    proof = prove(ANY_RESERVE, quiet)
    assert proof.finding is None
    assert [row.longest_drain for row in proof.rows] == [2 * row.num_blocks * row.block_size + 1 for row in proof.rows]
    sizes = {"num_blocks": 3, "block_size": 1, "slots": 2, "budget": None, "most_unfinished": 2}
    at_will = Explorer([Case(**sizes, reserve=0, any_reserve=True)])
    assert at_will.run().finding is None
    for reserve in range(3):
        fixed = Explorer([Case(**sizes, reserve=reserve)])
        fixed.run()
        assert fixed.keys() <= at_will.keys()


def test_a_reserve_that_could_hold_back_for_ever_is_found():
    class Lawless(Scheduler):
        def _reserve(self, head, need, taken):
            reserve = self.reserve.choose(head, need, taken, self.pool.num_free, self.running)
            return reserve + (reserve > 0)

    found = prove(ANY_RESERVE, quiet, Lawless).finding
    assert found.case.any_reserve
    assert as_json(found)["case"] == "2 blocks of 1, 1 slot, any reserve, 2 requests"
    assert found.message.startswith("INV-5: ")


def test_a_proof_ends_at_the_first_broken_rule():
    proof = prove(SMALL, quiet, WithoutWaiver)
    assert [(row.num_blocks, row.block_size) for row in proof.rows] == [(1, 1), (2, 1)]
    assert proof.as_json()["verdict"] == "broken"
    assert proof.as_json()["finding"] == as_json(proof.finding)
    assert as_json(proof.finding) == {
        "case": "2 blocks of 1, 1 slot, reserve 1, 2 requests",
        "message": "INV-5: step 0 has 1 unfinished and 0 tokens or releases",
        "trace": [
            "add a with a prompt of 2 tokens",
            "step 0: INV-5: step 0 has 1 unfinished and 0 tokens or releases",
        ],
    }


STORIES = {
    "no-waiver": [
        "add a with a prompt of 2 tokens",
        "step 0: INV-5: step 0 has 1 unfinished and 0 tokens or releases",
    ],
    "no-waiver-wall": [
        "add a with a prompt of 1 token",
        "add b with a prompt of 1 token",
        "step 0; admits a, b; a runs 1 token, holds 1; b runs 1 token, holds 1; 2 blocks free",
        "its result: a goes on, b goes on",
        "step 1; a runs 1 token, holds 2; b runs 1 token, holds 2; 0 blocks free",
        "its result: a goes on, b goes on",
        "step 2; preempts b; a runs 1 token, holds 3; 1 block free",
        "its result: a stops",
        "step 3: INV-7: the first request b stands still, step 3 runs []",
    ],
    "growth-under-watermark": [
        "add a with a prompt of 1 token",
        "step 0; admits a; a runs 1 token, holds 1; 1 block free",
        "its result: a goes on",
        "step 1: INV-7: the first request a was preempted in step 1",
    ],
    "oldest-as-victim": [
        "add a with a prompt of 1 token",
        "add b with a prompt of 1 token",
        "step 0; admits a, b; a runs 1 token, holds 1; b runs 1 token, holds 1; 0 blocks free",
        "its result: a goes on, b goes on",
        "step 1: INV-7: the first request a was preempted in step 1",
    ],
    "released-twice": [
        "add a with a prompt of 1 token",
        "step 0; admits a; a runs 1 token, holds 1; 0 blocks free",
        "its result: a goes on",
        "step 1: block 0: 1 holders released, but it has 0",
    ],
    "next-chunk-only": [
        "add a with a prompt of 2 tokens",
        "step 0: INV-3: running request a of 2 tokens holds 1 blocks, not 2",
    ],
}


@pytest.mark.parametrize("name", FAULT)
def test_a_planted_fault_is_found_by_its_shortest_trace(name):
    assert list(tell(find(FAULT[name], quiet))) == STORIES[name]


SHARING_STORIES = {
    "found-too-soon": [
        "add a with a prompt of 2 tokens",
        "step 0: INV-10: block 0, number 0 of request a, can be found as "
        "Link(parent=None, token_ids=(1001,)), not None",
    ],
    "last-token-found": [
        "add a with a prompt of 1 token of the twins",
        "step 0; admits a; a runs 1 token, holds 1; 0 blocks free",
        "its result: a goes on",
        "add b with a prompt of 1 token of the twins",
        "step 1: INV-3: running request b has 1 of 1 tokens computed",
    ],
    "parent-first": [
        "add a with a prompt of 2 tokens",
        "step 0; admits a; a runs 2 tokens, holds 2; 0 blocks free",
        "its result: a goes on",
        "step 1: INV-10: block 0 would be evicted before block 1 behind it",
    ],
}


@pytest.mark.parametrize("fault", SHARING_FAULTS[:3], ids=lambda fault: fault.name)
def test_a_planted_fault_in_sharing_is_found_by_its_shortest_trace(monkeypatch, fault):
    monkeypatch.setattr(proof_module, "FAULT_BOUNDS", Bounds(positions=2, slots=1, requests=2, budget=0, guesses=0))
    assert list(tell(find(fault, quiet))) == SHARING_STORIES[fault.name]


def test_a_block_that_has_no_holder_more_is_found(monkeypatch):
    monkeypatch.setattr(proof_module, "FAULT_BOUNDS", Bounds(positions=3, slots=2, requests=2, budget=0, guesses=0))
    assert find(SHARING_FAULTS[3], quiet).message == "INV-1: block 0 has 2 holders and a reference count of 1"


def test_the_wall_is_found_only_where_the_reserve_lets_every_prompt_in():
    found = find(FAULT["no-waiver-wall"], quiet)
    assert (found.case.num_blocks, found.case.reserve, found.case.longest_prompt) == (4, 2, 2)


def test_a_fault_that_is_none_is_not_found(monkeypatch):
    names = []
    monkeypatch.setattr(proof_module, "FAULT_BOUNDS", Bounds(positions=2, requests=2, guesses=0))
    assert find(PlantedFault("none", "nothing is wrong", Scheduler), names.append) is None
    assert names == ["planted: none"]


def test_a_story_has_a_line_for_each_thing_that_may_happen():
    case = Case(4, 1, 1, 0, None, 2, most_drafts=2)
    trace = (
        Action("add", "a", (1,)),
        Action("schedule", numbers=(2,)),
        Action("update", outcomes=((1, "goes on"),)),
        Action("add", "b", (2,)),
        Action("schedule", numbers=(1,)),
        Action("abort", "b"),
        Action("fail"),
        Action("schedule"),
        Action("update"),
    )
    assert tell(Finding(case, Scheduler, trace, "it all ends")) == (
        "add a with a prompt of 1 token",
        "step 0; admits a; a runs 3 tokens, the last 2 guessed, holds 3; 1 block free",
        "its result: a goes on behind 1 right guess",
        "add b with a prompt of 2 tokens",
        "step 1; a runs 2 tokens, the last 1 guessed, holds 4; 0 blocks free",
        "abort b",
        "its failure, and the end of who was in it",
        "step 2; releases b, a; 4 blocks free",
        "its result: nothing",
        "it all ends",
    )


@pytest.mark.parametrize("name", ["positions", "slots", "requests"])
def test_a_bound_below_one_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"--{name} must be from 1 to {MOST[name]}, got 0"):
        Bounds(**{name: 0})


def test_no_budget_and_no_guesses_are_bounds_and_less_is_refused():
    assert num_cases(Bounds(positions=1, slots=1, budget=0, guesses=0)) == 1
    assert num_cases(Bounds(positions=1, slots=4, requests=2, budget=3, guesses=2)) == 2 * 4 * 2
    with pytest.raises(ConfigError, match="--budget must be from 0 to 16, got -1"):
        Bounds(budget=-1)


@pytest.mark.parametrize("name", MOST)
def test_bounds_that_nobody_could_wait_for_are_refused_and_the_largest_begin_at_once(name):
    with pytest.raises(ConfigError, match=f"--{name} must be from . to {MOST[name]}, got 1000000000000"):
        Bounds(**{name: 10**12})
    assert num_cases(Bounds(**{name: MOST[name]})) < 10_000


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_with_a_policy_every_scheduler_is_of_it_and_the_rules_hold(policy):
    bounds = ORDERING.within(policy, False, False, {"positions": 2, "slots": 1, "requests": None})
    assert (bounds.requests, {case.policy for case in bounds.cases_of(2, 1)}) == (2, {policy})
    proof = prove(bounds, lambda text: None)
    assert proof.finding is None
    assert proof.num_states > 500


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_head_that_takes_the_place_of_one_before_it_is_found(policy):
    (fault,) = [each for each in planted_in(policy, False) if each.name == "anybodys-place"]
    assert fault.policy == policy
    assert find(fault, lambda text: None).message.startswith("INV-7: the first request")


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_the_wall_is_looked_for_in_four_blocks_under_a_policy_and_stands_there(monkeypatch, policy):
    case = Case(4, 1, 2, 2, None, 2, longest_prompt=2, policy=policy)
    assert Explorer([case], WithoutWaiver).run().finding.message.startswith("INV-7: the first request")
    (fault,) = [each for each in planted_in(policy, False) if each.name == "no-waiver-wall"]
    asked = []
    monkeypatch.setattr(proof_module, "Explorer", lambda cases, kind: asked.append(cases) or Explorer(cases[:1]))
    find(fault, quiet)
    assert case in asked[0]


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_with_the_prefix_cache_a_policys_faults_are_those_of_sharing_and_its_own(policy):
    faults = planted_in(policy, True)
    assert [each.name for each in faults] == [*(each.name for each in SHARING_FAULTS), "anybodys-place"]
    assert {(each.policy, each.prefix_cache) for each in faults} == {(policy, True)}


def test_a_policy_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="--policy must be one of fcfs, priority, fair, got 'lifo'"):
        ORDERING.within("lifo", False, False, {})


ON_A_DISK = Bounds(positions=2, slots=1, requests=2, budget=0, guesses=0).within("fcfs", False, False, {}, disk=True)


def test_with_a_disk_there_is_the_prefix_cache_too_and_the_rules_hold():
    assert {(case.prefix_cache, case.disk) for case in ON_A_DISK.cases_of(2, 1)} == {(True, True)}
    proof = prove(ON_A_DISK, quiet)
    assert proof.finding is None
    alone = prove(replace(ON_A_DISK, disk=False), quiet)
    assert proof.num_transitions > 1.2 * alone.num_transitions


DISK_STORIES = {
    "found-before-loaded": [
        "add a with a prompt of 2 tokens",
        "step 0: INV-10: block 0, number 0 of request a, can be found as "
        "Link(parent=None, token_ids=(1001,)), not None",
    ],
    "load-forgotten": [
        "add a with a prompt of 2 tokens",
        "step 0: INV-10: block 0, number 0 of request a, can be found as None, not "
        "Link(parent=None, token_ids=(1001,))",
    ],
}


@pytest.mark.parametrize("fault", DISK_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_beside_a_disk_is_found_by_its_shortest_trace(monkeypatch, fault):
    monkeypatch.setattr(proof_module, "FAULT_BOUNDS", Bounds(positions=2, slots=1, requests=2, budget=0, guesses=0))
    assert list(tell(find(fault, quiet))) == DISK_STORIES[fault.name]


def test_a_proof_with_a_disk_plants_its_faults_beside_those_of_sharing():
    assert planted_in("fcfs", True, True) == (*SHARING_FAULTS, *DISK_FAULTS)
    assert planted_in("fcfs", True) == SHARING_FAULTS


def test_a_story_says_what_is_loaded_and_who_waits_for_the_disk():
    case = Case(3, 1, 2, 0, None, 2, prefix_cache=True, policy="priority", disk=True)
    trace = (
        Action("add", "a", (1, 0, 1)),
        Action("schedule", numbers=(2,)),
        Action("update", outcomes=((0, "goes on"),)),
        Action("add", "b", (2,)),
        Action("schedule", numbers=(0, 2)),
        Action("update", outcomes=((0, "stops"),)),
        Action("schedule", numbers=(2,)),
    )
    assert tell(Finding(case, Scheduler, trace, "so far"))[4:] == (
        "step 1; a runs 1 token, holds 2; 1 block free",
        "its result: a stops",
        "step 2; releases a; admits b; loads 1 block; b runs 1 token, holds 2; 1 block free",
        "so far",
    )


def test_a_first_one_that_may_not_wait_for_the_disk_is_found(monkeypatch):
    case = Case(2, 1, 2, 0, None, 2, prefix_cache=True, policy="priority", disk=True)
    assert Explorer([case], most_actions=5).run().finding is None
    monkeypatch.setattr(Auditor, "_waits_for_disk", lambda self, request: False)
    found = Explorer([case], most_actions=5).run().finding
    assert found.message == "INV-7: the first request b stands still, step 1 runs ['a']"
