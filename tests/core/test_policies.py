"""The policies on the real scheduler: who goes first, who makes room, and how long anybody can be kept waiting."""

from __future__ import annotations

import random

import pytest

from helpers import Loop, ScriptedRunner, expected_output, make_request, make_scheduler
from millpond.core.fair_shares import Fair
from millpond.core.policies import Fcfs, Priority, make_policy
from millpond.core.request import Request, SamplingParams

POLICIES = {
    "fcfs": Fcfs,
    "priority": lambda: Priority(ageing_steps=5),
    "fair": lambda: Fair({"1": 2.0}, quantum=8),
}


def loop_of(policy, **sizes):
    """A Loop whose scheduler asks a policy, audited at every step."""
    scheduler = make_scheduler(**sizes)
    scheduler.policy = policy
    return Loop(scheduler, ScriptedRunner(block_size=scheduler.block_size))


def of(name, *, priority=0, tenant="", length=6, max_tokens=10):
    request = make_request(name, length, max_tokens)
    request.priority, request.tenant = priority, tenant
    return request


def names(requests):
    return [request.request_id for request in requests]


def finish(loop, name, most=1000):
    """Step until a request has ended; how many steps that took."""
    request = loop.scheduler.requests[name]
    for number in range(most):
        if request.is_finished:
            return number
        loop.step()
    raise AssertionError(f"{name} has not ended after {most} steps")


def test_a_policy_is_made_by_its_name_and_is_fcfs_where_none_is_given():
    kinds = [type(make_policy(name, {"a": 2.0})) for name in ("fcfs", "priority", "fair")]
    assert kinds == [Fcfs, Priority, Fair]
    assert make_policy("fair", {"a": 2.0}).weights == {"a": 2.0}
    assert make_policy("priority", {}, ageing_steps=7).ageing_steps == 7
    fair = make_policy("fair", {}, quantum=8, most_turns=9)
    assert (fair.quantum, fair.most_turns) == (8, 9)
    assert isinstance(make_scheduler().policy, Fcfs)


class TestPriority:
    def test_a_smaller_number_goes_first_and_equal_ones_by_arrival(self):
        loop = loop_of(Priority(), slots=1)
        loop.add(of("a"))
        loop.step()
        loop.add(of("late", priority=3), of("b", priority=1), of("c", priority=1), of("d", priority=2))
        admitted = []
        while loop.scheduler.has_work:
            admitted += loop.step().admitted
        assert admitted == ["b", "c", "d", "late"]

    def test_it_takes_the_slot_of_the_largest_number_at_once_and_that_one_loses_no_token(self):
        loop = loop_of(Priority(), slots=2)
        loop.add(low := of("low", priority=5), of("mid", priority=1))
        loop.step(), loop.step()
        tokens = list(low.output_token_ids)
        assert len(tokens) == 2
        loop.add(of("high", priority=-1))
        output = loop.step()
        assert (output.admitted, output.preempted) == (("high",), ("low",))
        assert names(loop.scheduler.running) == ["high", "mid"]
        assert (loop.scheduler.counters.displaced, loop.scheduler.counters.preemptions) == (1, 1)
        loop.run(100)
        assert low.output_token_ids == expected_output(low.prompt_token_ids, 10)

    def test_an_equal_number_takes_nobodys_place(self):
        loop = loop_of(Priority(), slots=1)
        loop.add(of("a", priority=2))
        loop.step()
        loop.add(of("b", priority=2))
        assert loop.step().preempted == ()
        assert loop.scheduler.counters.displaced == 0

    def test_for_blocks_it_takes_as_few_places_as_give_it_room_from_the_last_on(self):
        loop = loop_of(Priority(), num_blocks=8, slots=4)
        loop.add(*(of(name, priority=5 + number) for number, name in enumerate("abc")))  # two blocks each, two are free
        loop.step()
        loop.add(of("high", length=14, max_tokens=2))  # four blocks
        output = loop.step()
        assert (output.preempted, output.admitted) == (("c",), ("high",))

    def test_nobody_is_preempted_where_that_would_not_make_room_enough(self):
        loop = loop_of(Priority(), num_blocks=8, slots=4)
        loop.add(of("first", length=12, priority=-9), of("low", length=6, priority=5))  # three and two blocks
        loop.step()
        loop.add(of("high", length=22, max_tokens=2))  # six
        output = loop.step()
        assert (output.preempted, output.admitted) == ((), ())
        assert names(loop.scheduler.running) == ["first", "low"]

    def test_nobody_is_preempted_to_keep_the_reserve_for_those_who_may_be_preempted(self):
        loop = loop_of(Priority(), num_blocks=10, slots=5, reserve=3)
        loop.add(of("a", priority=-5), of("b", priority=5), of("c", priority=6))  # two blocks each, four are free
        loop.step()
        loop.add(of("low", priority=7))  # two, and the reserve
        assert loop.step().admitted == ()
        loop.add(of("high", length=14, max_tokens=2))  # four
        output = loop.step()
        assert (output.preempted, output.admitted) == ((), ("high",))
        assert (loop.scheduler.pool.num_free, loop.scheduler.notes.blocked.on) == (0, "blocks")
        assert loop.scheduler.counters.watermark_delays == 1

    def test_a_block_that_is_found_at_a_victim_must_be_there_beside_what_is_taken(self):
        loop = loop_of(Priority(), num_blocks=8, slots=4, prefix_cache=True)
        text = tuple(range(500, 521))
        low = Request("low", text[:9], 2, priority=5)
        loop.add(of("first", priority=-9, length=9, max_tokens=3), low)  # three blocks each, two are free
        loop.step()
        loop.add(Request("high", text, 2))  # six, of which two are low's
        assert loop.step().preempted == ()
        loop.run(50)

    def test_a_newcomer_goes_before_one_in_the_middle_of_its_prompt_which_keeps_a_token_a_step(self):
        loop = loop_of(Priority(), num_blocks=32, slots=3, budget=8)
        loop.add(long := of("long", priority=4, length=40, max_tokens=2))
        loop.step()
        assert long.num_computed_tokens == 8
        loop.add(of("high", length=12, max_tokens=2))
        shares = [(each.request_id, len(each.token_ids)) for each in loop.step().scheduled]
        assert shares == [("high", 7), ("long", 1)]
        shares = [(each.request_id, len(each.token_ids)) for each in loop.step().scheduled]
        assert shares == [("high", 5), ("long", 3)]
        assert long.num_preemptions == 0

    @pytest.mark.parametrize("difference", [1, 3])
    def test_a_number_that_is_larger_is_passed_by_those_within_its_bound_and_by_nobody_later(self, difference):
        ageing = 5
        loop = loop_of(Priority(ageing), slots=1)
        loop.add(of("patient", priority=difference, length=1, max_tokens=1))
        passed, step = [], 0
        while not loop.scheduler.requests["patient"].is_finished:
            loop.add(of(f"r{step}", length=1, max_tokens=1))
            passed += names(loop.scheduler.running)
            loop.step()
            step += 1
            assert step < 1000
        # One newcomer in each step, and one goes through in each: the first that no longer passes it waits behind it.
        assert step == ageing * difference + 1

    def test_with_the_prefix_cache_the_first_does_not_wait_for_a_block_that_one_behind_it_computes(self):
        loop = loop_of(Priority(), num_blocks=32, slots=2, budget=8, prefix_cache=True)
        text = tuple(range(500, 540))
        loop.add(Request("low", text, 2, priority=3))
        loop.step()
        loop.add(Request("high", text[:20], 2))
        output = loop.step()
        assert output.admitted == ("high",)
        loop.run(100)


class TestFair:
    def flood(self, loop, count=20, **sizes):
        loop.add(*(of(f"f{number}", tenant="flood", **sizes) for number in range(count)))

    def test_a_tenant_with_nothing_running_takes_the_last_place_of_the_one_with_most(self):
        loop = loop_of(Fair(), num_blocks=64, slots=4)
        self.flood(loop)
        loop.step()
        loop.add(of("single", tenant="other"))
        output = loop.step()
        assert (output.preempted, output.admitted) == (("f3",), ("single",))
        assert names(loop.scheduler.running) == ["f0", "single", "f1", "f2"]

    def test_a_second_request_takes_nobodys_place_and_has_the_next_slot(self):
        loop = loop_of(Fair(), num_blocks=64, slots=4)
        self.flood(loop)
        loop.step()
        loop.add(of("one", tenant="other"), of("two", tenant="other"))
        assert loop.step().admitted == ("one",)
        outputs = []
        while "two" not in [name for output in outputs for name in output.admitted]:
            outputs.append(loop.step())
        assert [output.preempted for output in outputs] == [()] * len(outputs)
        admitted = [name for output in outputs for name in output.admitted]
        assert admitted[:2] == ["f3", "two"]  # who was preempted goes on before anybody begins

    def test_a_second_request_waits_where_the_other_tenant_has_more_than_two(self):
        loop = loop_of(Fair(), num_blocks=64, slots=4)
        loop.add(of("one", tenant="other"))
        self.flood(loop, 3)
        loop.step()
        loop.add(of("two", tenant="other"))
        assert loop.step().preempted == ()

    def test_one_slot_is_not_taken_from_a_tenant_that_has_only_one(self):
        loop = loop_of(Fair(), slots=1)
        self.flood(loop, 3)
        loop.step()
        loop.add(of("single", tenant="other"))
        admitted = []
        while loop.scheduler.has_work:
            output = loop.step()
            admitted += output.admitted
            assert output.preempted == ()
        assert admitted == ["single", "f1", "f2"]

    @pytest.mark.parametrize(("weight", "share"), [(1.0, 1 / 2), (3.0, 3 / 4), (0.5, 1 / 3)])
    def test_two_floods_share_tokens_by_weight_however_long_their_requests_are(self, weight, share):
        loop = loop_of(Fair({"b": weight}, quantum=16), num_blocks=128, slots=8)
        for number in range(300):
            loop.add(of(f"a{number}", tenant="a", length=4, max_tokens=20))
            loop.add(of(f"b{number}", tenant="b", length=12, max_tokens=4))
        requests = dict(loop.scheduler.requests)
        for _ in range(200):
            loop.step()
        tokens = dict.fromkeys("ab", 0)
        for name, request in requests.items():
            began = request.ticket != Request("", (), 0).ticket
            tokens[name[0]] += began * request.num_prompt_tokens + request.num_output_tokens
        assert tokens["b"] / sum(tokens.values()) == pytest.approx(share, abs=0.05)

    def test_a_flood_of_a_thousand_delays_a_single_request_by_no_step_but_for_its_share_of_a_prompt(self):
        """The stated bound: admitted in the step after it came, whatever the flood does."""
        for when in (1, 2, 7, 30, 61):
            loop = loop_of(Fair(), num_blocks=64, slots=8, budget=32)
            self.flood(loop, 1000, length=12, max_tokens=24)
            for _ in range(when):
                loop.step()
            loop.add(single := of("single", tenant="other", length=12, max_tokens=3))
            assert "single" in loop.step().admitted
            assert single.num_output_tokens == 1
            assert finish(loop, "single") == 2

    def test_a_tenant_is_forgotten_with_its_last_request(self):
        loop = loop_of(Fair())
        loop.add(of("a", tenant="x"), of("b", tenant="y"))
        loop.step()
        loop.abort("a")
        assert list(loop.scheduler.policy.tenants) == ["y"]
        loop.run(50)
        policy = loop.scheduler.policy
        assert (policy.tenants, policy.idle, policy.busy, policy.preempted) == ({}, {}, {}, {})

    def test_ever_new_tenants_do_not_keep_anybody_waiting(self):
        loop = loop_of(Fair(quantum=8), num_blocks=16, slots=2)
        loop.add(*(of(f"a{number}", tenant="a", length=4, max_tokens=6) for number in range(4)))
        step, mine = 0, [loop.scheduler.requests[f"a{number}"] for number in range(4)]
        while not all(request.is_finished for request in mine):
            loop.add(of(f"new{step}", tenant=f"t{step}", length=4, max_tokens=2))
            loop.step()
            step += 1
            assert step < 400


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_a_storm_of_requests_ends_under_every_policy_with_the_answers_they_get_alone(policy, seed):
    """Small pools, every reserve, budgets, shared prompts, aborts; the auditor looks at every step."""
    draw = random.Random(seed)
    num_blocks, slots = draw.randint(3, 10), draw.randint(1, 5)
    loop = loop_of(
        POLICIES[policy](),
        num_blocks=num_blocks,
        block_size=draw.choice((1, 2, 4)),
        slots=slots,
        budget=draw.choice((None, 1, 3, 9)),
        reserve=draw.randrange(num_blocks),
        prefix_cache=draw.random() < 0.5,
    )
    most = num_blocks * loop.scheduler.block_size
    text = tuple(range(500, 500 + most))
    requests = []
    for number in range(40):
        length = draw.randint(1, max(1, most - 1))
        max_tokens = draw.randint(1, min(6, most - length + 1))
        request = of(f"r{number}", length=length, max_tokens=max_tokens)
        request.priority, request.tenant = draw.randint(-2, 2), str(draw.randint(0, 2))
        request.sampling = SamplingParams(cache_salt=draw.choice((None, "s")))
        shared = draw.randint(0, length)
        request.prompt_token_ids = text[:shared] + request.prompt_token_ids[shared:]
        requests.append(request)
        loop.add(request)
        for _ in range(draw.choice((0, 0, 1, 3))):
            loop.step()
        if draw.random() < 0.1:
            loop.abort(draw.choice(requests).request_id)
    loop.run(max_steps=40 * (most + 1) * (1 + slots))
    for request in requests:
        alone = expected_output(request.prompt_token_ids, request.max_tokens)
        assert request.output_token_ids == alone[: request.num_output_tokens]
        assert request.is_finished
    assert loop.scheduler.pool.num_free == num_blocks
