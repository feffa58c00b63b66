"""Edges of the scheduler, one behaviour each, over pools so small that the rare paths are common.

Every loop runs with the auditor on after each step, and counts its steps instead of hoping that it ends.
"""

import pytest

from helpers import ScriptedRunner, expected_output, make_loop, make_request, make_scheduler
from millpond.core.request import FinishReason, RequestState
from millpond.core.step import StepResult
from millpond.errors import InvalidRequestError


def ids(output):
    return [each.request_id for each in output.scheduled]


def assert_forgotten(loop, request):
    """After one more step nothing holds the request or knows its id, and everything it held is back."""
    loop.run()
    scheduler = loop.scheduler
    assert (request.block_ids, request.slot) == ([], None)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert sorted(scheduler.free_slots) == list(range(scheduler.max_num_seqs))
    for table in (scheduler.requests, scheduler.waiting, scheduler.running, scheduler.finished):
        assert not table
    assert not scheduler.step_is_in_flight


def preempted_loop():
    """Two blocks of 4: b is preempted in the second step, when a's fifth token needs its block."""
    loop = make_loop(a := make_request("a", 4, 4), b := make_request("b", 4, 4), num_blocks=2, slots=2)
    loop.steps(2)
    assert (a.state, b.state) == (RequestState.RUNNING, RequestState.WAITING)
    assert loop.outputs[1].preempted == ("b",)
    return loop, a, b


class TestAbort:
    def test_of_a_request_that_never_ran(self):
        loop = make_loop(a := make_request("a"))
        assert loop.scheduler.abort("a") is True
        assert (a.finish_reason, loop.scheduler.num_waiting) == (FinishReason.ABORT, 0)
        assert loop.run() == 1
        assert loop.outputs[0].released == ("a",)
        assert_forgotten(loop, a)

    def test_of_a_waiting_request_in_the_middle_leaves_the_order_of_the_others(self):
        loop = make_loop(*(make_request(name, 4, 1) for name in "abcd"), slots=1)
        loop.scheduler.abort("c")
        loop.run()
        assert [output.admitted for output in loop.outputs] == [("a",), ("b",), ("d",), ()]

    def test_of_a_preempted_request_gives_nothing_back_twice(self):
        loop, _, b = preempted_loop()
        assert b.block_ids == []
        loop.scheduler.abort("b")
        loop.run()
        assert (b.finish_reason, len(b.output_token_ids)) == (FinishReason.ABORT, 1)
        assert_forgotten(loop, b)

    def test_of_a_request_whose_preemption_came_in_the_step_in_flight(self):
        loop = make_loop(make_request("a", 4, 4), b := make_request("b", 4, 4), num_blocks=2, slots=2)
        loop.step()
        output = loop.schedule()
        assert output.preempted == ("b",)
        loop.scheduler.abort("b")
        loop.finish_step(output)
        assert loop.run() == 3
        assert_forgotten(loop, b)

    def test_in_the_middle_of_a_prefill(self):
        loop = make_loop(a := make_request("a", 10), budget=4)
        loop.steps(2)
        assert a.num_computed_tokens == 8
        loop.scheduler.abort("a")
        assert loop.run() == 1
        assert_forgotten(loop, a)

    def test_while_decoding(self):
        loop = make_loop(a := make_request("a"), b := make_request("b", 6, 4))
        loop.steps(2)
        loop.scheduler.abort("a")
        assert (a.finish_reason, len(a.output_token_ids)) == (FinishReason.ABORT, 2)
        loop.run()
        assert b.output_token_ids == expected_output(b.prompt_token_ids, 4)
        assert_forgotten(loop, a)

    def test_while_its_step_is_in_flight_drops_the_result(self):
        loop = make_loop(a := make_request("a"), b := make_request("b"))
        loop.step()
        output = loop.schedule()
        loop.scheduler.abort("a")
        loop.finish_step(output)
        assert (len(a.output_token_ids), a.num_computed_tokens, len(b.output_token_ids)) == (1, 6, 2)
        assert [update.request for update in loop.updates] == [a, b, b]
        assert_forgotten(loop, a)

    def test_while_its_step_is_in_flight_keeps_its_blocks_until_the_next_step(self):
        loop = make_loop(a := make_request("a"))
        output = loop.schedule()
        loop.scheduler.abort("a")
        assert (a.block_ids, loop.scheduler.pool.num_free) == ([0, 1], 6)
        loop.finish_step(output)
        assert loop.scheduler.pool.num_free == 6
        assert_forgotten(loop, a)

    def test_of_a_request_that_the_runner_says_nothing_of_any_more(self):
        loop = make_loop(make_request("a"))
        loop.schedule()
        loop.scheduler.abort("a")
        assert loop.scheduler.update(StepResult(())) == ()

    def test_in_the_step_that_finished_it_is_refused_and_keeps_the_reason(self):
        loop = make_loop(a := make_request("a", 4, 1))
        loop.step()
        assert loop.scheduler.abort("a") is False
        assert a.finish_reason is FinishReason.LENGTH
        assert_forgotten(loop, a)

    def test_twice_is_true_and_then_false(self):
        loop = make_loop(a := make_request("a"))
        loop.step()
        assert [loop.scheduler.abort("a"), loop.scheduler.abort("a")] == [True, False]
        assert_forgotten(loop, a)

    def test_of_an_unknown_id_is_false(self):
        loop = make_loop(make_request("a"))
        assert loop.scheduler.abort("ghost") is False
        assert loop.scheduler.num_waiting == 1

    def test_of_a_released_id_is_false(self):
        loop = make_loop(make_request("a", 4, 1))
        loop.run()
        assert loop.scheduler.abort("a") is False

    def test_of_a_request_that_faulted_is_false(self):
        loop = make_loop(a := make_request("a"), runner=ScriptedRunner(block_size=4, faults={"a": 0}))
        loop.step()
        assert loop.scheduler.abort("a") is False
        assert a.finish_reason is FinishReason.ERROR

    def test_of_everybody_takes_one_step_that_only_releases(self):
        loop = make_loop(*(make_request(name) for name in "abcdef"))
        loop.steps(2)
        assert all(loop.scheduler.abort(name) for name in "abcdef")
        assert loop.run() == 1
        assert set(loop.outputs[-1].released) == set("abcdef")
        assert loop.outputs[-1].scheduled == ()

    def test_makes_room_that_is_filled_in_the_next_step(self):
        loop = make_loop(make_request("a"), make_request("b"), slots=1)
        loop.step()
        loop.scheduler.abort("a")
        assert ids(loop.step()) == ["b"]

    def test_in_the_middle_of_a_resumption_gives_back_what_the_resumption_took(self):
        loop, _, b = preempted_loop()
        loop.scheduler.max_num_batched_tokens = 3
        loop.steps(3)
        assert (b.num_preemptions, b.num_computed_tokens, len(b.block_ids)) == (1, 3, 2)
        assert loop.scheduler.abort("b") is True
        assert loop.run() == 1
        assert_forgotten(loop, b)

    def test_of_a_head_that_did_not_fit_lets_the_next_in(self):
        loop = make_loop(make_request("a", 6), make_request("wide", 28, 1), make_request("narrow", 2, 1))
        loop.step()
        loop.scheduler.abort("wide")
        output = loop.step()
        assert (output.released, output.admitted, ids(output)) == (("wide",), ("narrow",), ["a", "narrow"])

    def test_frees_the_id_with_the_blocks_and_not_before(self):
        loop = make_loop(make_request("a"))
        loop.step()
        loop.scheduler.abort("a")
        with pytest.raises(InvalidRequestError, match="'a' is already in use"):
            loop.add(make_request("a"))
        loop.step()
        loop.add(make_request("a"))
        assert ids(loop.step()) == ["a"]

    def test_of_hundreds_leaves_nothing_behind(self):
        loop = make_loop(budget=5)
        for index in range(300):
            loop.add(request := make_request(f"r{index}", 1 + index % 13, 1 + index % 7))
            loop.steps(index % 4)
            loop.scheduler.abort(f"r{index - index % 3}")
        assert loop.run() <= 60
        assert_forgotten(loop, request)


class TestPreemption:
    def test_the_victim_is_the_youngest(self):
        loop = make_loop(*(make_request(name, 4, 8) for name in "abc"), num_blocks=3)
        loop.step()
        assert loop.step().preempted == ("c", "b")
        assert ids(loop.outputs[-1]) == ["a"]

    def test_with_nobody_younger_a_request_preempts_itself(self):
        loop = make_loop(make_request("a", 4, 4), b := make_request("b", 4, 4), num_blocks=3, slots=2)
        loop.step()
        output = loop.step()
        assert (output.preempted, ids(output), b.num_preemptions) == (("b",), ["a"], 1)
        assert loop.scheduler.pool.num_free == 1

    def test_the_oldest_is_never_a_victim(self):
        loop = make_loop(*(make_request(f"r{index}", 6, 10) for index in range(8)))
        loop.run()
        victims = {victim for output in loop.outputs for victim in output.preempted}
        assert victims
        assert "r0" not in victims

    def test_a_victim_that_has_just_grown_nobody_chooses(self):
        """Victims come from those not yet grown in this step: who has grown in it keeps what it got."""
        loop = make_loop(*(make_request(name, 4, 8) for name in "abc"), num_blocks=5)
        loop.step()
        output = loop.step()
        assert (output.preempted, ids(output)) == (("c",), ["a", "b"])
        assert [len(each.block_ids) for each in output.scheduled] == [2, 2]

    def test_what_a_victim_gave_back_serves_the_growth_behind_it_in_the_same_step(self):
        """a takes one of c's two blocks and b the other; victims chosen before the loop would have been two."""
        requests = make_request("a", 4, 8), make_request("b", 4, 8), make_request("c", 8, 8)
        loop = make_loop(*requests, num_blocks=4)
        loop.step()
        output = loop.step()
        assert (output.preempted, ids(output)) == (("c",), ["a", "b"])
        assert ([len(each.block_ids) for each in output.scheduled], loop.scheduler.pool.num_free) == ([2, 2], 0)

    def test_victims_are_counted_again_for_each_that_grows(self):
        """c goes for a's growth in one step, b for its own in the next."""
        loop = make_loop(
            *(make_request(name, length, 9) for name, length in (("a", 8), ("b", 3), ("c", 4))), num_blocks=4
        )
        loop.step()
        first, second = loop.steps(2)
        assert (first.preempted, ids(first)) == (("c",), ["a", "b"])
        assert (second.preempted, ids(second)) == (("b",), ["a"])

    def test_nobody_is_preempted_and_admitted_in_one_step(self):
        loop = make_loop(*(make_request(f"r{index}", 6, 10) for index in range(8)))
        assert loop.run() == 38
        assert sum(len(output.preempted) for output in loop.outputs) == 4
        assert not any(set(output.preempted) & set(output.admitted) for output in loop.outputs)

    def test_victims_go_back_to_the_head_in_arrival_order(self):
        loop = make_loop(*(make_request(name, 4, 8) for name in "abcd"), num_blocks=3)
        loop.steps(2)
        assert loop.outputs[1].preempted == ("c", "b")
        assert list(loop.scheduler.waiting) == ["b", "c", "d"]

    def test_a_victim_keeps_its_tokens_and_loses_what_was_computed(self):
        _, _, b = preempted_loop()
        assert (len(b.output_token_ids), b.num_computed_tokens, b.block_ids, b.slot) == (1, 0, [], None)

    def test_a_resumed_request_prefills_prompt_and_output_in_one_go(self):
        loop, _, b = preempted_loop()
        loop.steps(2)
        (resumed,) = loop.step().scheduled
        assert resumed.token_ids == (*b.prompt_token_ids, *b.output_token_ids[:1])
        assert resumed.admission.output_token_ids == tuple(b.output_token_ids[:1])
        assert (resumed.first_position, resumed.output_position) == (0, 1)

    def test_a_preempted_answer_is_the_answer_it_would_have_had(self):
        loop, a, b = preempted_loop()
        loop.run(20)
        assert [a.output_token_ids, b.output_token_ids] == [
            expected_output(a.prompt_token_ids, 4),
            expected_output(b.prompt_token_ids, 4),
        ]

    def test_a_resumption_in_chunks_samples_only_behind_its_last_token(self):
        loop = make_loop(make_request("a", 4, 4), b := make_request("b", 4, 4), num_blocks=2, slots=2, budget=8)
        loop.steps(2)
        loop.scheduler.max_num_batched_tokens = 3
        loop.steps(2)
        chunks = [loop.step().scheduled[0] for _ in range(2)]
        assert [(len(each.token_ids), each.samples) for each in chunks] == [(3, False), (2, True)]
        loop.run(10)
        assert b.output_token_ids == expected_output(b.prompt_token_ids, 4)

    def test_growth_ignores_the_watermark(self):
        loop = make_loop(a := make_request("a", 4, 12), num_blocks=4, reserve=3)
        assert loop.run() == 13
        assert (a.num_preemptions, len(a.output_token_ids)) == (0, 12)

    @pytest.mark.parametrize(("length_of_a", "generated", "thrashed"), [(6, 3, 1), (5, 4, 0)])
    def test_an_eviction_before_a_block_was_filled_is_thrash(self, length_of_a, generated, thrashed):
        loop = make_loop(make_request("a", length_of_a, 9), b := make_request("b", 2, 8), num_blocks=4, slots=2)
        while not loop.step().preempted:
            assert b.num_output_tokens <= generated
        assert (b.num_preemptions, b.num_output_tokens) == (1, generated)
        assert loop.scheduler.counters.thrashed_admissions == thrashed

    def test_thrash_counts_from_the_latest_admission(self):
        """b is evicted with 5 tokens out, which is no thrash, and again 3 tokens after its resumption, which is."""
        loop = make_loop(make_request("a", 2, 6), make_request("c", 4, 10), b := make_request("b", 2, 12), num_blocks=6)
        outputs_at_eviction = []
        while not b.is_finished:
            if "b" in loop.step().preempted:
                outputs_at_eviction.append(b.num_output_tokens)
        assert outputs_at_eviction == [5, 8]
        assert loop.scheduler.counters.thrashed_admissions == 1


class TestPromptLengths:
    @pytest.mark.parametrize(("length", "blocks"), [(3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
    def test_a_prompt_holds_blocks_for_its_own_tokens_only(self, length, blocks):
        loop = make_loop(make_request("a", length))
        assert len(loop.step().scheduled[0].block_ids) == blocks

    @pytest.mark.parametrize("length", [4, 8])
    def test_a_whole_multiple_of_the_block_size_buys_its_next_block_in_its_first_decode(self, length):
        loop = make_loop(make_request("a", length))
        assert [len(loop.step().scheduled[0].block_ids) for _ in range(5)] == [length // 4] + [length // 4 + 1] * 4

    @pytest.mark.parametrize("length", [3, 7])
    def test_one_short_of_a_multiple_buys_it_one_step_later(self, length):
        loop = make_loop(make_request("a", length))
        blocks = (length + 1) // 4
        assert [len(loop.step().scheduled[0].block_ids) for _ in range(3)] == [blocks, blocks, blocks + 1]

    @pytest.mark.parametrize("length", [5, 9])
    def test_one_above_a_multiple_buys_the_next_when_its_block_is_full(self, length):
        loop = make_loop(make_request("a", length))
        blocks = length // 4 + 1
        assert [len(loop.step().scheduled[0].block_ids) for _ in range(5)] == [blocks] * 4 + [blocks + 1]

    def test_a_prompt_of_one_token_runs(self):
        loop = make_loop(a := make_request("a", 1, 3))
        assert loop.run() == 4
        assert a.output_token_ids == expected_output(a.prompt_token_ids, 3)

    def test_blocks_of_one_token_buy_one_in_every_step(self):
        loop = make_loop(make_request("a", 2, 4), num_blocks=5, block_size=1)
        assert [len(each.scheduled[0].block_ids) for each in loop.steps(4)] == [2, 3, 4, 5]

    def test_the_last_token_needs_no_block(self):
        loop = make_loop(a := make_request("a", 4, 5), num_blocks=2)
        assert loop.run() == 6
        assert (len(a.output_token_ids), a.num_preemptions) == (5, 0)

    def test_a_prompt_that_fills_the_pool_runs_for_one_token(self):
        loop = make_loop(make_request("a", 32, 1))
        assert loop.run() == 2

    def test_a_prompt_that_fills_the_pool_is_refused_for_two_tokens_with_both_numbers(self):
        with pytest.raises(InvalidRequestError, match="needs 9 blocks of 4 tokens and the pool has 8"):
            make_loop(make_request("a", 32, 2))

    def test_a_request_that_fills_the_pool_waits_for_all_of_it(self):
        loop = make_loop(make_request("a", 4, 3), make_request("whole", 32, 1))
        assert [output.admitted for output in loop.steps(4)] == [("a",), (), (), ("whole",)]


class TestTheDoor:
    """Eight blocks of 4: 32 positions, and one token more, which is delivered and never put through the model."""

    @pytest.mark.parametrize("length", [1, 4, 31, 32])
    def test_what_exactly_fills_the_pool_is_let_in_and_runs_without_preemption(self, length):
        loop = make_loop(a := make_request("a", length, 33 - length))
        assert loop.run() == 33 - length + 1
        assert max(len(output.scheduled[0].block_ids) for output in loop.outputs[:-1]) == 8
        assert a.output_token_ids == expected_output(a.prompt_token_ids, 33 - length)

    @pytest.mark.parametrize("length", [1, 4, 31, 32])
    def test_one_token_more_is_refused_with_both_numbers_and_what_would_fit(self, length):
        with pytest.raises(InvalidRequestError) as refused:
            make_loop(make_request("a", length, 34 - length))
        assert "needs 9 blocks of 4 tokens and the pool has 8" in str(refused.value)
        assert f"max_tokens can be at most {33 - length}" in str(refused.value)

    def test_a_prompt_one_above_the_pool_is_refused_whatever_it_asks(self):
        with pytest.raises(InvalidRequestError, match="the prompt has 33 tokens: that needs 9 blocks"):
            make_loop(make_request("a", 33, 1))

    @pytest.mark.parametrize(("max_tokens", "is_let_in"), [(4, True), (5, False)])
    def test_max_model_len_counts_prompt_and_output(self, max_tokens, is_let_in):
        scheduler = make_scheduler(max_model_len=10)
        if is_let_in:
            scheduler.add_request(make_request("a", 6, max_tokens))
        else:
            with pytest.raises(InvalidRequestError, match="together 11, more than max_model_len 10"):
                scheduler.add_request(make_request("a", 6, max_tokens))
        assert scheduler.num_waiting == is_let_in

    def test_it_does_not_ask_the_watermark(self):
        loop = make_loop(make_request("a", 32, 1), reserve=7)
        assert loop.run() == 2


class TestAdmission:
    def test_it_comes_after_growth_which_takes_the_last_block(self):
        loop = make_loop(make_request("a", 4, 4), num_blocks=2, slots=2)
        loop.step()
        loop.add(make_request("b", 4, 1))
        output = loop.step()
        assert (output.admitted, output.preempted, ids(output)) == ((), (), ["a"])

    def test_the_first_that_does_not_fit_stops_it(self):
        loop = make_loop(make_request("a", 6), make_request("wide", 28, 1), make_request("narrow", 2, 1))
        assert loop.step().admitted == ("a",)
        assert list(loop.scheduler.waiting) == ["wide", "narrow"]

    def test_it_buys_all_present_tokens_and_not_just_the_next_chunk(self):
        loop = make_loop(make_request("a", 12, 4), make_request("b", 24, 1), budget=16)
        assert loop.step().admitted == ("a",)

    def test_a_slot_freed_in_a_step_is_filled_in_it(self):
        loop = make_loop(make_request("a", 4, 2), make_request("b", 4, 2), slots=1)
        loop.steps(2)
        output = loop.step()
        assert (output.released, output.admitted) == (("a",), ("b",))
        assert (output.scheduled[0].slot, output.scheduled[0].admission is not None) == (0, True)

    def test_blocks_freed_in_a_step_are_given_out_in_it(self):
        loop = make_loop(make_request("a", 8, 1), make_request("b", 8, 1), num_blocks=2)
        assert [output.admitted for output in loop.steps(2)] == [("a",), ("b",)]

    def test_a_slot_freed_by_a_preemption_can_be_taken_by_nobody_before_its_victim(self):
        loop = make_loop(*(make_request(name, 4, 4) for name in "ab"), make_request("c", 1, 1), num_blocks=2, slots=2)
        loop.steps(2)
        assert (loop.outputs[1].preempted, loop.outputs[1].admitted) == (("b",), ())

    def test_the_slots_bound_who_runs(self):
        loop = make_loop(*(make_request(name, 1, 2) for name in "abcde"), slots=2)
        assert len(loop.step().scheduled) == 2


class TestWork:
    def test_there_is_none_at_the_start(self):
        assert make_loop().scheduler.has_work is False

    def test_a_step_without_work_schedules_nothing(self):
        output = make_loop().step()
        assert (output.scheduled, output.released, output.num_tokens) == ((), (), 0)

    def test_it_lasts_until_what_finished_is_released(self):
        loop = make_loop(make_request("a", 4, 1))
        loop.step()
        assert (loop.scheduler.num_running, loop.scheduler.has_work) == (0, True)
        loop.step()
        assert loop.scheduler.has_work is False

    def test_a_step_that_only_releases_counts(self):
        loop = make_loop(make_request("a", 4, 1))
        loop.run()
        assert loop.scheduler.counters.iterations == 2

    def test_a_request_added_while_a_step_is_in_flight_starts_in_the_next(self):
        loop = make_loop(make_request("a"))
        output = loop.schedule()
        loop.add(make_request("b"))
        loop.finish_step(output)
        assert loop.step().admitted == ("b",)

    def test_a_prompt_one_above_the_budget_starts_at_once(self):
        loop = make_loop(make_request("a", 9, 1), budget=8)
        assert loop.run() == 3
