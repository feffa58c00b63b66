"""Guesses in the scheduler: where they may go, and what is left of them when they were wrong."""

import copy
import random
from dataclasses import replace

import pytest

from helpers import Loop, ScriptedDrafter, ScriptedRunner, expected_output, make_request, make_scheduler, next_token
from millpond.core.block_pool import blocks_for_length
from millpond.core.request import FinishReason
from millpond.core.step import SampledTokens, StepResult
from millpond.errors import InvariantError


class Oracle(ScriptedDrafter):
    """Always `count` guesses, of which the first `num_right` are right."""

    def __init__(self, count, num_right=None):
        super().__init__()
        self.count, self.num_right = count, count if num_right is None else num_right
        self.most, self.loads, self.forgotten = [], [], []

    def draft(self, request, most, load):
        self.most.append(most)
        self.loads.append((load.tokens, load.rows))
        sequence = list(request.token_ids_between(0, request.num_tokens))
        for index in range(min(self.count, most)):
            sequence.append(next_token(sequence) if index < self.num_right else 1)
        return tuple(sequence[request.num_tokens :])

    def forget(self, request_id):
        self.forgotten.append(request_id)


def loop_of(*requests, drafter, **sizes):
    loop = Loop(make_scheduler(drafter=drafter, **sizes))
    loop.add(*requests)
    return loop


def shares(output):
    return {each.request_id: (len(each.token_ids), each.num_drafts) for each in output.scheduled}


def test_drafts_stand_behind_the_newest_token_and_right_ones_all_count():
    loop = loop_of(request := make_request("a", 6, 10), drafter=Oracle(3))
    output = loop.step()
    (only,) = output.scheduled
    expected = expected_output(request.prompt_token_ids, 4)
    assert (only.num_drafts, only.token_ids) == (3, request.prompt_token_ids + tuple(expected[:3]))
    assert (only.samples, only.output_position) == (True, 0)
    assert (request.output_token_ids, request.num_computed_tokens) == (expected, 9)
    assert loop.updates[-1].token_ids == tuple(expected)
    (only,) = loop.step().scheduled
    assert (only.first_position, only.output_position, only.token_ids[0]) == (9, 4, expected[-1])


def test_of_wrong_drafts_nothing_is_left_but_the_token_that_was_sampled():
    loop = loop_of(request := make_request("a", 6, 10), drafter=Oracle(5, num_right=2))
    loop.schedule()
    assert (len(request.block_ids), loop.scheduler.pool.num_free) == (3, 5)
    loop.finish_step(loop.outputs[-1])
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 3)
    assert (request.num_computed_tokens, request.draft_token_ids) == (8, ())
    assert (len(request.block_ids), loop.scheduler.pool.num_free) == (2, 6)
    assert loop.scheduler.drafter.learned == [("a", 5, 2)]


def test_a_request_with_drafts_ends_with_the_same_answer_in_fewer_steps():
    loop = loop_of(request := make_request("a", 6, 10), drafter=Oracle(4, num_right=3))
    assert loop.run() == 4
    assert request.output_token_ids == expected_output(request.prompt_token_ids, 10)
    assert request.finish_reason is FinishReason.LENGTH
    counters = loop.scheduler.counters
    assert (counters.drafted_tokens, counters.accepted_tokens, counters.forward_tokens) == (9, 7, 6 + 2 + 9)


def test_no_more_is_drafted_than_the_request_may_still_generate():
    loop = loop_of(make_request("a", 6, 10), drafter=Oracle(4))
    loop.run()
    assert loop.scheduler.drafter.most == [9, 4]
    assert [shares(output).get("a") for output in loop.outputs] == [(10, 4), (5, 4), None]


def test_a_request_of_one_token_is_never_drafted_for():
    loop = loop_of(make_request("a", 6, 1), drafter=Oracle(4))
    loop.run()
    assert loop.scheduler.drafter.most == []


def test_the_drafter_is_told_how_many_requests_the_step_samples_for():
    loop = loop_of(make_request("a", 4, 9), make_request("b", 20, 9), drafter=Oracle(1), num_blocks=32, budget=8)
    loop.steps(4)
    assert loop.scheduler.drafter.loads == [(2, 2), (2, 2)]


def test_the_drafter_forgets_a_request_with_its_release():
    loop = loop_of(make_request("a", 6, 3), drafter=Oracle(1))
    loop.steps(2)
    assert loop.scheduler.drafter.forgotten == []
    assert loop.step().released == ("a",)
    assert loop.scheduler.drafter.forgotten == ["a"]


@pytest.mark.parametrize("budget", range(1, 14))
def test_drafts_get_what_is_left_of_the_budget_oldest_first(budget):
    loop = loop_of(*(make_request(name, 4, 9) for name in "ab"), drafter=Oracle(4), num_blocks=32, budget=budget)
    first = loop.step()
    assert first.num_tokens <= budget
    a, b = (shares(first).get(name, (0, 0)) for name in "ab")
    assert a[0] - a[1] == min(4, budget)
    assert b[0] - b[1] == max(0, min(4, budget - 4))
    assert (a[1], b[1]) == (max(0, min(4, budget - 8)), max(0, min(4, budget - 12)))


def test_a_prompt_in_the_middle_is_not_guessed_on():
    loop = loop_of(make_request("a", 10, 9), drafter=Oracle(4), num_blocks=32, budget=4)
    assert [shares(each)["a"] for each in loop.steps(3)] == [(4, 0), (4, 0), (4, 2)]


def test_drafts_take_free_blocks_only_and_give_them_back():
    loop = loop_of(*(make_request(name, 4, 9) for name in "ab"), drafter=Oracle(8, num_right=0), num_blocks=4)
    assert shares(loop.schedule()) == {"a": (12, 8), "b": (4, 0)}
    assert loop.scheduler.pool.num_free == 0
    loop.finish_step(loop.outputs[-1])
    assert loop.scheduler.pool.num_free == 2
    # Each grows by a block for its newest token, and that leaves room for three more.
    assert shares(loop.step()) == {"a": (4, 3), "b": (4, 3)}
    assert loop.scheduler.pool.num_free == 0


def test_nobody_is_preempted_or_kept_waiting_for_the_sake_of_a_draft():
    """Each step of many tight runs is also decided by a copy without a drafter: it must decide the same."""
    num_drafts = 0
    for seed in range(25):
        rng = random.Random(seed)
        num_blocks, block_size = rng.randint(3, 9), rng.randint(1, 4)
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "slots": 3, "reserve": rng.randrange(num_blocks)}
        loop = loop_of(drafter=ScriptedDrafter(), budget=rng.choice([None, 3, 8]), **sizes)
        for index in range(12):
            most = min(12, loop.scheduler.door.max_tokens_that_fit(3))
            loop.add(make_request(f"r{index}", 3 if most else 1, rng.randint(1, most or 1)))
        while loop.scheduler.has_work:
            plain = copy.deepcopy(loop.scheduler)
            plain.drafter = None
            expected, output = plain.schedule(), loop.schedule()
            assert without_drafts(output, block_size) == without_drafts(expected, block_size)
            num_drafts += sum(each.num_drafts for each in output.scheduled)
            loop.finish_step(output)
    assert num_drafts > 500


def without_drafts(output, block_size):
    """A step less its guesses, and less the blocks that those alone asked for."""

    def own(each):
        end = len(each.token_ids) - each.num_drafts
        tokens = each.first_position + end if each.samples else len(each.block_ids) * block_size
        blocks = each.block_ids[: blocks_for_length(tokens, block_size)]
        return each._replace(token_ids=each.token_ids[:end], block_ids=blocks, num_drafts=0)

    return replace(output, scheduled=tuple(own(each) for each in output.scheduled))


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("end", range(7))
def test_a_stop_token_among_the_drafts_ends_the_request_there(count, end):
    request = make_request("a", 6, 7)
    answer = expected_output(request.prompt_token_ids, 7)
    request.stop_token_ids = frozenset({answer[end]})
    loop = loop_of(request, drafter=Oracle(count))
    loop.run()
    assert (request.output_token_ids, request.finish_reason) == (answer[: end + 1], FinishReason.STOP)
    assert [token for update in loop.updates for token in update.token_ids] == answer[: end + 1]


def test_an_abort_while_drafts_are_in_flight_gives_all_blocks_back():
    loop = loop_of(make_request("a", 6, 10), drafter=Oracle(8))
    output = loop.schedule()
    loop.scheduler.abort("a")
    loop.finish_step(output)
    loop.run()
    assert loop.scheduler.pool.num_free == 8


@pytest.mark.parametrize("position", range(5))
def test_a_fault_behind_right_drafts_ends_the_request_with_the_tokens_before_it(position):
    request = make_request("a", 6, 10)
    loop = Loop(make_scheduler(drafter=Oracle(4)), ScriptedRunner(block_size=4, faults={"a": position}))
    loop.add(request)
    loop.run()
    assert request.finish_reason is FinishReason.ERROR
    assert request.output_token_ids == expected_output(request.prompt_token_ids, position)


def test_a_resumed_request_may_draft_at_once():
    sizes = {"num_blocks": 6, "slots": 2}
    requests = [make_request(name, 5, 14) for name in "ab"]
    loop = loop_of(*requests, drafter=ScriptedDrafter(), **sizes)
    loop.run()
    assert loop.scheduler.counters.preemptions > 0
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 14)


class TestWhatIsRefused:
    @pytest.mark.parametrize("tokens", [(), (5, 6), "three right and two more"])
    def test_a_result_that_the_drafts_do_not_lead_to(self, tokens):
        loop = loop_of(request := make_request("a", 6, 10), drafter=Oracle(3))
        (only,) = loop.schedule().scheduled
        given = tokens if isinstance(tokens, tuple) else (*only.token_ids[-3:], 7, 8)
        with pytest.raises(InvariantError, match=r"request a: has tokens \(.*\) behind the drafts \(\d+, \d+, \d+\)"):
            loop.scheduler.update(StepResult((SampledTokens("a", given),)))
        assert (request.output_token_ids, request.num_computed_tokens) == ([], 0)

    def test_the_auditor_sees_drafts_beyond_max_tokens(self):
        loop = loop_of(make_request("a", 6, 3), drafter=None)
        output = loop.scheduler.schedule()
        (only,) = output.scheduled
        longer = only._replace(token_ids=(*only.token_ids, 1, 2, 3), num_drafts=3)
        with pytest.raises(InvariantError, match="INV-6: request a has 3 drafts, but room for 2"):
            loop.auditor.after_schedule(replace(output, scheduled=(longer,)))

    def test_the_auditor_sees_drafts_in_the_middle_of_a_prompt(self):
        loop = loop_of(make_request("a", 6, 9), drafter=None, budget=4)
        output = loop.scheduler.schedule()
        (only,) = output.scheduled
        longer = only._replace(token_ids=(*only.token_ids, 1), num_drafts=1)
        with pytest.raises(InvariantError, match="INV-6: request a has 1 drafts, but room for 0"):
            loop.auditor.after_schedule(replace(output, scheduled=(longer,)))

    def test_the_auditor_sees_a_wrong_draft_that_counts_as_computed(self):
        loop = loop_of(request := make_request("a", 6, 10), drafter=Oracle(3, num_right=1))
        loop.step()
        request.num_computed_tokens -= 1
        with pytest.raises(InvariantError, match="INV-6: request a goes on at position 6, not 7"):
            loop.step()
