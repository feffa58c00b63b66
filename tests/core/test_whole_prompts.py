"""Prompts that may not be cut: each is in one step, and gets one token there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers import Loop, make_request
from millpond.core.policies import make_policy
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import PromptLookup
from millpond.errors import ConfigError, InvalidRequestError, InvariantError
from millpond.lab.explorer import Explorer
from millpond.lab.world import Case


def scheduler_of(**settings):
    sizes = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 12}
    return Scheduler(**{**sizes, "whole_prompts": True, **settings})


def request_of(name, length, **fields):
    request = make_request(name, length, max_tokens=1)
    for field, value in fields.items():
        setattr(request, field, value)
    return request


def steps_of(scheduler, *requests):
    """The names of each step's requests, audited."""
    loop = Loop(scheduler)
    loop.add(*requests)
    steps = []
    while scheduler.has_work:
        steps.append("".join(each.request_id for each in loop.step().scheduled))
    return [step for step in steps if step]


def test_a_prompt_that_does_not_fit_the_rest_of_a_step_waits_for_the_next_one():
    requests = [request_of(name, length) for name, length in zip("abcd", (5, 6, 2, 12), strict=True)]
    assert steps_of(scheduler_of(), *requests) == ["ab", "c", "d"]


def test_a_step_is_filled_to_its_last_token():
    assert steps_of(scheduler_of(), *(request_of(name, 4) for name in "abcd")) == ["abc", "d"]


def test_without_a_budget_a_step_takes_what_slots_and_blocks_allow():
    scheduler = scheduler_of(max_num_batched_tokens=None, num_blocks=6)
    assert steps_of(scheduler, *(request_of(name, 8) for name in "abcd")) == ["abc", "d"]


def test_the_step_says_of_the_head_that_its_tokens_had_no_room():
    scheduler = scheduler_of()
    loop = Loop(scheduler)
    loop.add(request_of("a", 8), request_of("b", 8))
    loop.step()
    assert scheduler.notes.blocked[:2] == ("b", "budget")


def test_the_reserve_delays_a_prompt_and_excludes_none():
    scheduler = scheduler_of(num_blocks=4, watermark_blocks=3)
    assert steps_of(scheduler, *(request_of(name, length) for name, length in zip("abc", (4, 4, 12), strict=True))) == [
        "a",
        "b",
        "c",
    ]


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_nobody_is_displaced_in_the_step_in_which_it_would_be_done(policy):
    scheduler = scheduler_of(max_num_seqs=2, policy=make_policy(policy, {}))
    requests = [request_of(name, 4, tenant=name, priority=-ord(name)) for name in "abcd"]
    steps = steps_of(scheduler, *requests)
    assert sorted("".join(steps)) == list("abcd")
    assert len(steps) == 2
    assert scheduler.counters.preemptions == 0
    if policy == "priority":
        assert set(steps[0]) == set("dc")


def test_a_bound_on_prompts_beside_who_decodes_does_not_cut_them():
    scheduler = scheduler_of()
    scheduler.add_request(request_of("a", 12))
    assert scheduler.schedule(prefill_budget=1).num_tokens == 12


def test_the_prompt_may_have_all_of_max_model_len_and_one_token_is_all_it_gets():
    scheduler = scheduler_of()
    scheduler.add_request(request_of("a", 12))
    with pytest.raises(InvalidRequestError, match="has 13 tokens, more than max_model_len 12"):
        scheduler.add_request(request_of("b", 13))
    with pytest.raises(InvalidRequestError, match="max_tokens must be 1 where prompts are whole, got 2") as error:
        scheduler.add_request(make_request("c", 3, max_tokens=2))
    assert error.value.param == "max_tokens"
    assert scheduler.door.max_tokens_that_fit(12) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_num_batched_tokens": 11}, "max_num_batched_tokens, 11, must be at least max_model_len, 12"),
        ({"prefix_cache": True}, "no prefix to find"),
        ({"drafter": PromptLookup(4)}, "nothing to guess"),
    ],
    ids=["budget", "cache", "drafts"],
)
def test_what_might_cut_a_prompt_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        scheduler_of(**settings)


@pytest.mark.parametrize("change", [{"first_position": 1}, {"samples": False}], ids=str)
def test_the_auditor_sees_a_prompt_that_was_cut(change, monkeypatch):
    monkeypatch.setattr("millpond.core.invariants._check_share", lambda *seen: None)
    loop = Loop(scheduler_of())
    loop.add(request_of("a", 5))
    output = loop.scheduler.schedule()
    (share,) = output.scheduled
    with pytest.raises(InvariantError, match=r"INV-11: request a has 5 tokens from position \d on, which is not"):
        loop.auditor.after_schedule(replace(output, scheduled=(share._replace(**change),)))


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 2, 1, 3, 3, whole_prompts=True),
        Case(3, 1, 2, 0, 2, 2, whole_prompts=True, policy="priority"),
        Case(2, 1, 2, 0, None, 2, whole_prompts=True, policy="fair"),
        Case(4, 1, 2, 0, 3, 2, whole_prompts=True, any_reserve=True),
    ],
    ids=str,
)
def test_every_reachable_state_keeps_the_invariants_and_drains(case):
    explored = Explorer([case]).run()
    assert explored.finding is None
    assert explored.num_states > 50
