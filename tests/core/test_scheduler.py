"""One step at a time: growth, admission, the token budget, and what a result does."""

import pytest

from helpers import Loop, ScriptedRunner, expected_output, make_request, make_scheduler
from millpond.core.request import FinishReason, SamplingParams
from millpond.core.step import RequestFault, SampledTokens, StepResult
from millpond.errors import ConfigError, InvariantError


def shares(output):
    return {each.request_id: len(each.token_ids) for each in output.scheduled}


def test_a_first_step_forwards_the_prompt_and_samples_behind_it():
    loop = Loop(make_scheduler())
    loop.add(request := make_request("a", 6, seed=7, sampling=SamplingParams(temperature=0)))
    (only,) = loop.schedule().scheduled
    assert (only.request_id, only.slot, only.first_position) == ("a", 0, 0)
    assert (only.token_ids, only.block_ids) == (request.prompt_token_ids, (0, 1))
    assert (only.samples, only.output_position) == (True, 0)
    assert only.admission.prompt_token_ids == request.prompt_token_ids
    assert (only.admission.output_token_ids, only.admission.seed) == ((), 7)
    assert only.admission.sampling is request.sampling


def test_a_decode_step_forwards_the_newest_token_and_no_admission():
    loop = Loop(make_scheduler())
    loop.add(request := make_request("a", 6))
    loop.step()
    (only,) = loop.step().scheduled
    assert (only.first_position, only.token_ids) == (6, (request.output_token_ids[0],))
    assert (only.samples, only.output_position, only.admission) == (True, 1, None)


def test_a_request_takes_one_step_per_token_and_one_to_be_released():
    loop = Loop(make_scheduler())
    loop.add(make_request("a", 6, 10))
    assert loop.run() == 11
    assert loop.outputs[-1].released == ("a",)


def test_the_answer_is_there_in_the_step_of_its_last_token_not_at_the_release():
    loop = Loop(make_scheduler())
    loop.add(request := make_request("a", 6, 2))
    loop.steps(2)
    assert (request.finish_reason, loop.updates[-1].token_ids) == (FinishReason.LENGTH, (request.output_token_ids[-1],))
    assert loop.scheduler.pool.num_free < 8
    assert loop.scheduler.has_work


def test_slots_are_given_out_smallest_first():
    loop = Loop(make_scheduler(num_blocks=20, slots=4))
    loop.add(*(make_request(name, 4, 5) for name in "abc"), make_request("d", 4, 1))
    assert [each.slot for each in loop.step().scheduled] == [0, 1, 2, 3]
    loop.scheduler.abort("c")
    loop.scheduler.abort("a")
    loop.add(make_request("e"), make_request("f"), make_request("g"))
    assert {each.request_id: each.slot for each in loop.step().scheduled} == {"b": 1, "e": 0, "f": 2, "g": 3}


class TestBudget:
    def test_a_prompt_longer_than_the_budget_runs_in_chunks_and_samples_once(self):
        loop = Loop(make_scheduler(budget=4))
        loop.add(make_request("a", 10, 1))
        chunks = [loop.step().scheduled[0] for _ in range(3)]
        assert [(each.first_position, len(each.token_ids), each.samples) for each in chunks] == [
            (0, 4, False),
            (4, 4, False),
            (8, 2, True),
        ]
        assert [each.admission is not None for each in chunks] == [True, False, False]
        assert loop.run() == 1

    def test_a_chunked_request_holds_blocks_for_all_its_tokens_from_the_start(self):
        loop = Loop(make_scheduler(budget=4))
        loop.add(make_request("a", 10, 1))
        assert loop.schedule().scheduled[0].block_ids == (0, 1, 2)

    @pytest.mark.parametrize(("length", "steps"), [(7, 2), (8, 2), (9, 3)])
    def test_a_prompt_around_the_budget_starts_and_ends(self, length, steps):
        loop = Loop(make_scheduler(budget=8))
        loop.add(make_request("a", length, 1))
        assert loop.run() == steps

    def test_decodes_and_the_last_chunk_come_first_and_a_newcomer_gets_the_rest(self):
        loop = Loop(make_scheduler(num_blocks=32, budget=8))
        loop.add(make_request("long", 20, 2))
        loop.steps(2)
        loop.add(make_request("short", 2, 9), make_request("late", 20, 1))
        assert shares(loop.step()) == {"long": 4, "short": 2, "late": 2}
        assert shares(loop.step()) == {"long": 1, "short": 1, "late": 6}

    def test_prefills_go_one_after_the_other_in_arrival_order(self):
        loop = Loop(make_scheduler(num_blocks=32, budget=8))
        loop.add(make_request("a", 6), make_request("b", 6), make_request("c", 6))
        assert shares(loop.step()) == {"a": 6, "b": 2}
        assert shares(loop.step()) == {"a": 1, "b": 4, "c": 3}

    @pytest.mark.parametrize("budget", range(1, 12))
    def test_every_running_request_gets_a_token_in_every_step(self, budget):
        loop = Loop(make_scheduler(num_blocks=12, slots=6, budget=budget))
        loop.add(*(make_request(f"r{index}", 1 + index * 7 % 11, 1 + index * 5 % 9) for index in range(30)))
        for _ in range(500):
            output = loop.schedule()
            assert list(shares(output)) == [request.request_id for request in loop.scheduler.running]
            assert all(shares(output).values())
            assert output.num_tokens <= budget
            loop.finish_step(output)
        assert not loop.scheduler.has_work

    def test_a_spent_budget_admits_nobody(self):
        loop = Loop(make_scheduler(num_blocks=32, budget=4))
        loop.add(make_request("a", 10), make_request("b", 2))
        assert [loop.step().admitted for _ in range(3)] == [("a",), (), ("b",)]

    @pytest.mark.parametrize(("budget", "steps"), [(1, 49), (2, 27), (3, 19)])
    def test_a_budget_below_the_slots_still_serves_everybody(self, budget, steps):
        loop = Loop(make_scheduler(num_blocks=64, slots=8, budget=budget))
        loop.add(*(make_request(f"r{index}", 5, 4) for index in range(6)))
        assert loop.run() == steps

    def test_a_prefill_gets_its_share_while_decodes_fill_all_other_slots(self):
        loop = Loop(make_scheduler(num_blocks=64, slots=4, budget=4))
        loop.add(*(make_request(name, 1, 30) for name in "abc"), make_request("late", 6, 1))
        outputs = loop.steps(7)
        assert [shares(output).get("late", 0) for output in outputs] == [1, 1, 1, 1, 1, 1, 0]

    @pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 100])
    def test_the_answers_do_not_depend_on_the_budget(self, budget):
        loop = Loop(make_scheduler(budget=budget))
        loop.add(*(make_request(f"r{index}", 3 + index, 10) for index in range(6)))
        loop.run(500)
        answers = {update.request for update in loop.updates}
        assert len(answers) == 6
        for request in answers:
            assert request.output_token_ids == expected_output(request.prompt_token_ids, 10)

    def test_fullness_is_computed_afresh_when_a_chunked_prefill_ends(self):
        loop = Loop(make_scheduler(num_blocks=32, slots=2, budget=8))
        loop.add(make_request("long", 24, 20))
        loop.steps(2)
        last_chunk = loop.schedule()
        loop.add(make_request("short", 3, 2))
        loop.finish_step(last_chunk)
        assert loop.step().admitted == ("short",)

    def test_a_full_pool_never_stops_the_chunks_of_who_is_in_it(self):
        loop = Loop(make_scheduler(num_blocks=4, slots=2, budget=4))
        loop.add(make_request("a", 4, 6), make_request("b", 12, 2))
        assert loop.step().admitted == ("a",)
        assert shares(loop.step()) == {"a": 1}
        assert loop.scheduler.pool.num_free == 2
        assert loop.run() == 9


class TestUpdate:
    def test_it_returns_tokens_in_schedule_order(self):
        loop = Loop(make_scheduler())
        loop.add(make_request("b", 4), make_request("a", 4))
        output = loop.schedule()
        updates = loop.scheduler.update(StepResult((SampledTokens("a", (5,)), SampledTokens("b", (6,)))))
        assert [each.request_id for each in output.scheduled] == ["b", "a"]
        assert [(each.request.request_id, each.token_ids, each.fault) for each in updates] == [
            ("b", (6,), None),
            ("a", (5,), None),
        ]

    def test_a_chunk_that_does_not_sample_advances_and_has_no_record(self):
        loop = Loop(make_scheduler(budget=4))
        loop.add(request := make_request("a", 6))
        loop.schedule()
        assert loop.scheduler.update(StepResult(())) == ()
        assert (request.num_computed_tokens, request.output_token_ids) == (4, [])

    def test_a_stop_token_ends_the_request_and_is_kept(self):
        loop = Loop(make_scheduler(), ScriptedRunner(block_size=4, script={"a": [11, 12, 13]}))
        loop.add(request := make_request("a", 4, stop_token_ids=frozenset({12})))
        assert loop.run() == 3
        assert (request.output_token_ids, request.finish_reason) == ([11, 12], FinishReason.STOP)

    def test_a_stop_token_in_the_last_place_is_a_stop(self):
        loop = Loop(make_scheduler(), ScriptedRunner(block_size=4, script={"a": [11, 12]}))
        loop.add(request := make_request("a", 4, 2, stop_token_ids=frozenset({12})))
        loop.run()
        assert request.finish_reason is FinishReason.STOP

    def test_a_fault_ends_its_request_alone_and_keeps_the_message(self):
        loop = Loop(make_scheduler(), ScriptedRunner(block_size=4, faults={"a": 1}))
        loop.add(bad := make_request("a", 4, 3), good := make_request("b", 4, 3))
        loop.run()
        assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "the logits are not finite")
        assert len(bad.output_token_ids) == 1
        assert [each.fault for each in loop.updates if each.fault] == ["the logits are not finite"]
        assert (good.finish_reason, good.error) == (FinishReason.LENGTH, None)
        assert good.output_token_ids == expected_output(good.prompt_token_ids, 3)

    def test_a_fault_in_a_chunk_that_does_not_sample_ends_the_request(self):
        loop = Loop(make_scheduler(budget=4))
        loop.add(request := make_request("a", 6))
        loop.schedule()
        (record,) = loop.scheduler.update(StepResult((), (RequestFault("a", "broken"),)))
        assert (record.request, record.token_ids, record.fault) == (request, (), "broken")
        assert request.finish_reason is FinishReason.ERROR

    @pytest.mark.parametrize(
        ("sampled", "faults", "message"),
        [
            ((), (), "request a: scheduled to sample, got neither a token nor a fault"),
            ((("a", 1), ("a", 2)), (), "answers a request twice"),
            ((("a", 1),), ("a",), "answers a request twice"),
            ((("a", 1), ("c", 1)), (), "request c: has a result but was not scheduled"),
            ((("a", 1),), ("c",), "request c: has a result but was not scheduled"),
            ((("a", 1), ("b", 1)), (), "request b: has a token but was scheduled without sampling"),
        ],
    )
    def test_a_result_that_does_not_answer_the_step_raises_and_changes_nothing(self, sampled, faults, message):
        loop = Loop(make_scheduler(budget=6))
        loop.add(a := make_request("a", 4), b := make_request("b", 4), make_request("c", 4))
        loop.schedule()
        result = StepResult(
            tuple(SampledTokens(name, (token,)) for name, token in sampled), tuple(RequestFault(r, "x") for r in faults)
        )
        with pytest.raises(InvariantError, match=message):
            loop.scheduler.update(result)
        assert [(each.num_computed_tokens, each.output_token_ids) for each in (a, b)] == [(0, []), (0, [])]
        loop.scheduler.update(StepResult((SampledTokens("a", (1,)),)))
        assert (a.num_computed_tokens, b.num_computed_tokens, a.output_token_ids) == (4, 2, [1])

    def test_a_second_result_for_a_step_is_refused(self):
        loop = Loop(make_scheduler())
        loop.add(make_request("a"))
        loop.step()
        with pytest.raises(InvariantError, match="request a: has a result but was not scheduled"):
            loop.scheduler.update(StepResult((SampledTokens("a", (1,)),)))

    def test_a_step_in_flight_must_be_answered_before_the_next(self):
        loop = Loop(make_scheduler())
        loop.add(make_request("a"))
        loop.step()
        loop.schedule()
        with pytest.raises(InvariantError, match="step 1 is still in flight"):
            loop.scheduler.schedule()


class TestFailedStep:
    def test_its_requests_end_with_an_error_and_the_others_go_on(self):
        loop = Loop(make_scheduler(slots=2), ScriptedRunner(block_size=4, raises={1: RuntimeError("boom")}))
        loop.add(a := make_request("a", 4, 3), b := make_request("b", 4, 3), c := make_request("c", 4, 3))
        loop.step()
        output = loop.schedule()
        with pytest.raises(RuntimeError, match="boom"):
            loop.runner.execute(output)
        loop.scheduler.fail([each.request_id for each in output.scheduled], "the step failed")
        loop.auditor.after_update(StepResult(()))
        assert [(each.finish_reason, each.error) for each in (a, b)] == [(FinishReason.ERROR, "the step failed")] * 2
        assert loop.run() == 4
        assert c.output_token_ids == expected_output(c.prompt_token_ids, 3)
        assert loop.scheduler.pool.num_free == 8

    def test_a_request_aborted_during_it_stays_aborted(self):
        loop = Loop(make_scheduler())
        loop.add(a := make_request("a"))
        loop.schedule()
        loop.scheduler.abort("a")
        loop.scheduler.fail(["a"], "the step failed")
        assert (a.finish_reason, a.error) == (FinishReason.ABORT, None)

    def test_failing_an_unknown_request_changes_nothing(self):
        loop = Loop(make_scheduler())
        loop.add(a := make_request("a"))
        with pytest.raises(InvariantError, match="request ghost: unknown"):
            loop.scheduler.fail(["a", "ghost"], "the step failed")
        assert not a.is_finished


class TestFinish:
    def test_a_stop_string_ends_a_running_request(self):
        loop = Loop(make_scheduler())
        loop.add(a := make_request("a"))
        loop.step()
        loop.scheduler.finish("a", FinishReason.STOP)
        assert loop.run() == 1
        assert a.finish_reason is FinishReason.STOP

    def test_a_stop_string_in_the_last_allowed_token_wins_over_length(self):
        loop = Loop(make_scheduler())
        loop.add(a := make_request("a", 4, 1))
        loop.step()
        loop.scheduler.finish("a", FinishReason.STOP)
        assert loop.run() == 1
        assert a.finish_reason is FinishReason.STOP

    def test_what_was_aborted_cannot_finish(self):
        loop = Loop(make_scheduler())
        loop.add(make_request("a"))
        loop.scheduler.abort("a")
        with pytest.raises(InvariantError, match="request a: finished -> finished is not a legal edge"):
            loop.scheduler.finish("a", FinishReason.STOP)


def test_what_ended_can_be_released_without_a_step():
    loop = Loop(make_scheduler())
    loop.add(make_request("a"), make_request("b"))
    loop.step()
    loop.scheduler.abort("a")
    loop.scheduler.abort("b")
    assert loop.scheduler.release_finished() == ("a", "b")
    assert (loop.scheduler.has_work, loop.scheduler.pool.num_free) == (False, 8)


@pytest.mark.parametrize("name", ["block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_size_below_one_is_refused_by_name(name):
    argument = {"max_num_seqs": "slots", "max_num_batched_tokens": "budget"}.get(name, name)
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        make_scheduler(**{argument: 0})


def test_a_reserve_that_is_the_whole_pool_is_refused():
    with pytest.raises(ConfigError, match="below the 8 blocks of the pool, got 8"):
        make_scheduler(reserve=8)


def test_a_step_looks_at_no_more_of_the_waiting_than_it_admits():
    """Ten thousand waiting requests cost nothing: the scheduler never walks them."""
    scheduler = make_scheduler(slots=2)
    for index in range(10_000):
        scheduler.add_request(make_request(f"r{index}", 4, 5))
    looked_at = 0

    class Watched(type(scheduler.waiting)):
        def values(self):
            nonlocal looked_at
            for request in super().values():
                looked_at += 1
                yield request

    scheduler.waiting = Watched(scheduler.waiting)
    loop = Loop(scheduler)
    for _ in range(50):
        output = scheduler.schedule()
        scheduler.update(loop.runner.execute(output))
    assert looked_at <= 2 * 50 + scheduler.counters.admissions
