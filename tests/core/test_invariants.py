"""Each invariant is broken on purpose, and the auditor must name it and both sides."""

from dataclasses import replace

import pytest

from helpers import Loop, make_request, make_scheduler
from millpond.core.invariants import Auditor, audit, check_same_decisions
from millpond.core.prefix_cache import Link
from millpond.core.request import Request, RequestState, SamplingParams
from millpond.errors import InvariantError


@pytest.fixture
def loop():
    """a and b are running with two blocks each and one token out, c waits for a slot."""
    loop = Loop(make_scheduler(slots=2))
    loop.add(*(make_request(name) for name in "abc"))
    loop.step()
    return loop


def named(number, text):
    return pytest.raises(InvariantError, match=f"INV-{number}: .*{text}")


def test_a_sound_state_passes(loop):
    audit(loop.scheduler)
    loop.schedule()
    audit(loop.scheduler)


def test_an_empty_scheduler_passes():
    audit(make_scheduler())


class TestInv1Blocks:
    def test_a_block_that_two_requests_hold(self, loop):
        requests = loop.scheduler.requests
        requests["b"].block_ids[0] = requests["a"].block_ids[0]
        with named(1, "block 0 has 2 holders and a reference count of 1"):
            audit(loop.scheduler)

    def test_a_block_that_is_neither_free_nor_held(self, loop):
        loop.scheduler.requests["b"].block_ids.pop()
        with named(1, "block 3 has 0 holders and a reference count of 1"):
            audit(loop.scheduler)

    def test_a_block_that_is_free_and_held(self, loop):
        loop.scheduler.pool._free[2] = None
        with named(1, "block 2 has 1 holders and is free 1 times"):
            audit(loop.scheduler)

    def test_a_block_that_is_held_while_the_pool_counts_it_free(self, loop):
        loop.scheduler.pool.release([0])
        with named(1, "block 0 has 1 holders and a reference count of 0"):
            audit(loop.scheduler)

    def test_a_block_that_got_lost(self, loop):
        del loop.scheduler.pool._free[7]
        with named(1, "block 7 has 0 holders and is free 0 times"):
            audit(loop.scheduler)

    def test_a_block_from_outside_the_pool(self, loop):
        loop.scheduler.requests["a"].block_ids.append(8)
        with named(1, "block 8 is free or held, but the pool has 8"):
            audit(loop.scheduler)


class TestInv2WaitingHoldsNothing:
    def test_a_waiting_request_with_a_block(self, loop):
        loop.scheduler.requests["c"].block_ids += loop.scheduler.pool.allocate(1)
        with named(2, "waiting request c holds 1 blocks, not 0"):
            audit(loop.scheduler)

    def test_a_waiting_request_with_a_slot(self):
        scheduler = make_scheduler(slots=3)
        scheduler.add_request(request := make_request("a"))
        request.slot = scheduler.free_slots.pop()
        with named(2, "waiting request a holds slot 2, not none"):
            audit(scheduler)

    def test_a_waiting_request_with_computed_tokens(self, loop):
        loop.scheduler.requests["c"].num_computed_tokens = 4
        with named(2, "waiting request c has 4 computed tokens in 0 blocks"):
            audit(loop.scheduler)

    def test_a_slot_that_two_requests_hold(self, loop):
        loop.scheduler.requests["b"].slot = 0
        with named(2, r"free slots \[\] and held slots \[0, 0\] are not all 2 once"):
            audit(loop.scheduler)

    def test_a_slot_that_got_lost(self):
        scheduler = make_scheduler(slots=3)
        scheduler.free_slots.remove(1)
        with named(2, r"free slots \[0, 2\] and held slots \[\] are not all 3 once"):
            audit(scheduler)

    def test_a_running_request_without_a_slot(self, loop):
        loop.scheduler.requests["a"].slot = None
        with named(2, "running request a has no slot"):
            audit(loop.scheduler)


class TestInv3RunningHoldsItsLength:
    def test_a_block_too_many(self, loop):
        loop.scheduler.requests["a"].block_ids += loop.scheduler.pool.allocate(1)
        with named(3, "running request a of 7 tokens holds 3 blocks, not 2"):
            audit(loop.scheduler)

    def test_a_block_too_few_once_scheduled(self, loop):
        loop.steps(2)
        request = loop.scheduler.requests["a"]
        assert (request.num_tokens, len(request.block_ids)) == (9, 2)
        audit(loop.scheduler)
        loop.schedule()
        loop.scheduler.pool.release([request.block_ids.pop()])
        with named(3, "running request a of 9 tokens holds 2 blocks, not 3"):
            audit(loop.scheduler)

    def test_nothing_left_to_compute(self, loop):
        loop.scheduler.requests["a"].num_computed_tokens = 7
        with named(3, "running request a has 7 of 7 tokens computed"):
            audit(loop.scheduler)


class TestInv4Queues:
    def test_waiting_out_of_arrival_order(self, loop):
        loop.add(make_request("d"))
        loop.scheduler.waiting.move_to_end("c")
        with named(4, "waiting has d of arrival 3 before c of arrival 2"):
            audit(loop.scheduler)

    def test_running_out_of_arrival_order(self, loop):
        loop.scheduler.running.reverse()
        with named(4, "running has b of arrival 1 before a of arrival 0"):
            audit(loop.scheduler)

    def test_a_request_in_both_queues(self, loop):
        loop.scheduler.running.append(loop.scheduler.requests["c"])
        with named(4, "request c is queued as running and is waiting"):
            audit(loop.scheduler)

    def test_a_request_twice_in_one_queue(self, loop):
        loop.scheduler.running.append(loop.scheduler.requests["b"])
        with named(4, r"queued are \['a', 'b', 'b', 'c'\], unfinished are \['a', 'b', 'c'\]"):
            audit(loop.scheduler)

    def test_an_unfinished_request_in_no_queue(self, loop):
        del loop.scheduler.waiting["c"]
        with named(4, r"queued are \['a', 'b'\], unfinished are \['a', 'b', 'c'\]"):
            audit(loop.scheduler)

    def test_a_queued_request_in_another_state(self, loop):
        loop.scheduler.requests["c"].state = RequestState.FINISHED
        with named(4, "request c is queued as waiting and is finished"):
            audit(loop.scheduler)


class TestInv5Progress:
    def test_a_step_that_does_nothing_while_requests_wait(self, monkeypatch):
        loop = Loop(make_scheduler())
        loop.add(make_request("a"))
        monkeypatch.setattr(loop.scheduler, "_admit", lambda budget: ((), ()))
        with named(5, "step 0 has 1 unfinished and 0 tokens or releases"):
            loop.step()

    def test_a_running_request_without_a_token(self, loop):
        output = loop.scheduler.schedule()
        with named(5, r"step 1 has tokens for \['a'\], but \['a', 'b'\] are running"):
            loop.auditor.after_schedule(replace(output, scheduled=output.scheduled[:1]))


class TestInv6NoTokenIsLost:
    def test_a_preemption_that_drops_the_output(self):
        loop = Loop(make_scheduler(num_blocks=2, slots=2))
        loop.add(make_request("a", 4, 3), b := make_request("b", 4, 3))
        loop.steps(2)
        assert b.num_preemptions == 1
        b.output_token_ids.clear()
        with named(6, r"request b has output \[\], but was given \[\d+\]"):
            loop.step()

    def test_a_request_that_goes_on_at_a_position_it_never_reached(self, loop):
        loop.scheduler.requests["a"].num_computed_tokens = 5
        with named(6, "request a goes on at position 5, not 6"):
            loop.step()

    def test_a_victim_that_keeps_its_computed_positions(self, monkeypatch):
        loop = Loop(make_scheduler(num_blocks=2, slots=2))
        loop.add(make_request("a", 4, 3), b := make_request("b", 4, 3))
        loop.steps(3)
        assert (b.num_preemptions, loop.scheduler.num_running) == (1, 0)
        start = loop.scheduler._start

        def keep(request, need, found, fetched):
            start(request, need, found, fetched)
            request.num_computed_tokens = 4

        monkeypatch.setattr(loop.scheduler, "_start", keep)
        with named(6, "request b goes on at position 4, not 0"):
            loop.step()

    def test_a_share_of_other_tokens(self, loop):
        output = loop.scheduler.schedule()
        first = output.scheduled[0]._replace(token_ids=(1,))
        with named(6, r"request a runs \(1,\) at position 6, not \(\d+,\)"):
            loop.auditor.after_schedule(replace(output, scheduled=(first, *output.scheduled[1:])))

    def test_a_last_token_that_is_not_sampled_behind(self, loop):
        output = loop.scheduler.schedule()
        first = output.scheduled[0]._replace(samples=False)
        with named(6, "request a has samples False at position 7 of 7"):
            loop.auditor.after_schedule(replace(output, scheduled=(first, *output.scheduled[1:])))

    def test_a_runner_that_is_not_told_of_a_newcomer(self):
        loop = Loop(make_scheduler())
        loop.add(make_request("a", 4))
        output = loop.scheduler.schedule()
        silent = output.scheduled[0]._replace(admission=None)
        with named(6, r"request a starts at 0 of \(.*\), but the runner is told None"):
            loop.auditor.after_schedule(replace(output, scheduled=(silent,)))

    def test_an_update_that_loses_a_token(self, loop):
        output = loop.schedule()
        result = loop.runner.execute(output)
        loop.scheduler.update(result)
        loop.scheduler.requests["a"].output_token_ids.pop()
        with named(6, "request a has output .* but was given"):
            loop.auditor.after_update(result)


class TestInv7EverybodyEnds:
    def test_a_request_that_vanishes(self, loop):
        del loop.scheduler.requests["c"]
        del loop.scheduler.waiting["c"]
        with named(7, "request c was dropped while waiting, not finished"):
            loop.step()

    def test_a_younger_request_that_is_let_in_before_the_oldest(self, monkeypatch):
        scheduler = make_scheduler(slots=1)
        loop = Loop(scheduler)
        loop.add(make_request("a"), make_request("b"))
        admit = scheduler._admit

        def admit_b_first(budget):
            scheduler.waiting.move_to_end("a")
            admitted = admit(budget)
            scheduler.waiting.move_to_end("a", last=False)
            return admitted

        monkeypatch.setattr(scheduler, "_admit", admit_b_first)
        with named(7, r"the first request a stands still, step 0 runs \['b'\]"):
            loop.step()

    def test_an_oldest_request_that_is_preempted_although_it_goes_on(self, loop):
        scheduler = loop.scheduler
        grow = scheduler._grow
        scheduler._grow = lambda: (*grow(), *(scheduler._preempt(request) for request in scheduler.running[::-1]))
        with named(7, "the first request a was preempted in step 1"):
            loop.step()


class TestInv8SameDecisions:
    def outputs(self, budget=None):
        loop = Loop(make_scheduler(budget=budget))
        loop.add(*(make_request(f"r{index}") for index in range(8)))
        loop.run()
        return loop.outputs

    def test_two_runs_over_the_same_requests_agree(self):
        check_same_decisions(self.outputs(), self.outputs())

    def test_a_step_decided_otherwise(self):
        with named(8, "step 0 decided .* in one run and .* in the other"):
            check_same_decisions(self.outputs(), self.outputs(budget=8))

    def test_a_run_that_ends_sooner(self):
        outputs = self.outputs()
        with named(8, f"one run took {len(outputs)} steps and the other {len(outputs) - 1}"):
            check_same_decisions(outputs, outputs[:-1])


@pytest.fixture
def cached():
    """a has run: its first block (0) and its second (1) can be found. b runs behind the first, with block 2."""
    loop = Loop(make_scheduler(prefix_cache=True))
    loop.add(Request("a", tuple(range(10)), 1))
    loop.run(3)
    loop.add(Request("b", (*range(4), 77, 78), 5))
    loop.schedule()
    loop.finish_step(loop.outputs[-1])
    assert loop.scheduler.requests["b"].block_ids == [0, 2]
    audit(loop.scheduler)
    return loop


class TestInv9NothingSharedIsWritten:
    def test_a_block_with_another_holder(self, cached):
        output = cached.scheduler.schedule()
        cached.scheduler.pool._ref_counts[2] = 2
        with named(9, "request b writes block 2, which has 2 holders, not 1"):
            cached.auditor._check_writes(output.scheduled[0])

    def test_a_block_that_can_be_found(self, cached):
        output = cached.scheduler.schedule()
        share = output.scheduled[0]._replace(first_position=3)
        with named(9, r"request b writes block 0, which can be found as Link\(parent=None, token_ids=\(0, 1, 2, 3\)\)"):
            cached.auditor._check_writes(share)


class TestInv10WhatCanBeFoundIsRight:
    def relink(self, loop, block_id, link):
        key, _ = loop.scheduler.cache._links[block_id]
        loop.scheduler.cache._links[block_id] = key, link

    def test_a_block_twice(self, cached):
        self.relink(cached, 1, Link(None, (0, 1, 2, 3)))
        with named(10, r"blocks 0 and 1 can both be found as Link\(parent=None, token_ids=\(0, 1, 2, 3\)\)"):
            audit(cached.scheduler)

    def test_a_block_whose_parent_is_lost(self, cached):
        self.relink(cached, 1, Link(5, (4, 5, 6, 7)))
        with named(10, "block 1 can be found behind block 5, which cannot"):
            audit(cached.scheduler)

    def test_a_block_with_more_holders_than_the_one_before_it(self, cached):
        pool, a = cached.scheduler.pool, cached.scheduler.requests["b"]
        pool.share((1,))
        pool.share((1,))
        other = make_request("c")
        other.block_ids += [1, 1]
        cached.scheduler.requests["c"] = other
        other.state = RequestState.FINISHED
        assert a.block_ids[0] == 0
        with named(10, "block 1 has 2 holders, block 0 before it only 1"):
            audit(cached.scheduler)

    def test_a_parent_that_would_be_evicted_first(self, cached):
        cached.abort("b")
        cached.step()
        cached.scheduler.pool._findable.move_to_end(1)
        with named(10, "block 0 would be evicted before block 1 behind it"):
            audit(cached.scheduler)

    def test_a_running_request_whose_full_block_is_found_as_another(self, cached):
        cached.scheduler.requests["b"].sampling = SamplingParams(cache_salt="s")
        with named(10, r"block 0, number 0 of request b, can be found as Link\(parent=None, .*, not Link\(parent='s'"):
            audit(cached.scheduler)

    def test_a_block_that_can_be_found_before_its_step_has_come_back(self, cached):
        cached.steps(1)
        output = cached.scheduler.schedule()
        request = cached.scheduler.requests["b"]
        request.num_computed_tokens = 8
        cached.scheduler._publish(request)
        request.num_computed_tokens = 7
        with named(10, r"block 2, number 1 of request b, can be found as Link\(parent=0, .*, not None"):
            cached.auditor.after_schedule(output)

    def test_a_block_of_a_request_that_was_aborted_in_flight(self, cached):
        cached.steps(1)
        output = cached.schedule()
        request = cached.scheduler.requests["b"]
        cached.abort("b")
        request.num_computed_tokens = 8
        cached.scheduler._publish(request)
        with named(10, r"block 2 can be found as Link\(parent=0, .*, but was not computed as that"):
            cached.finish_step(output)

    def test_a_start_that_is_not_at_a_block(self, cached, monkeypatch):
        start = cached.scheduler._start

        def further(request, need, found, fetched):
            start(request, need, found, fetched)
            request.num_computed_tokens += 1

        monkeypatch.setattr(cached.scheduler, "_start", further)
        cached.add(Request("c", tuple(range(7)), 1))
        with named(6, "request c has found 5 tokens in blocks of 4, of 6"):
            cached.step()


def test_an_auditor_may_join_a_scheduler_that_is_running(loop):
    loop.auditor = Auditor(loop.scheduler)
    loop.run(100)
    assert len(loop.updates) == 30
