"""Edges of the watermark: a share or blocks, whom it delays, whom it is waived for, and the wall without that."""

import pytest

from helpers import expected_output, make_loop, make_request
from millpond.core.block_pool import resolve_watermark_blocks
from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError, InvariantError


class TestWatermark:
    @pytest.mark.parametrize(("num_blocks", "blocks"), [(8, 0), (99, 0), (100, 1), (250, 2)])
    def test_the_share_is_inert_under_a_hundred_blocks(self, num_blocks, blocks):
        assert resolve_watermark_blocks(num_blocks, 0.01) == blocks

    @pytest.mark.parametrize(("given", "blocks"), [(None, 5), (0, 0), (3, 3), (499, 499)])
    def test_blocks_win_over_the_share(self, given, blocks):
        assert resolve_watermark_blocks(500, 0.01, given) == blocks

    @pytest.mark.parametrize("given", [-1, 8, 9])
    def test_a_reserve_that_the_pool_cannot_hold_is_refused_with_both_numbers(self, given):
        with pytest.raises(ConfigError, match=f"at least 0 and below the 8 blocks of the pool, got {given}"):
            resolve_watermark_blocks(8, 0.01, given)

    def test_it_keeps_a_newcomer_out_while_others_run(self):
        loop = make_loop(make_request("a", 16, 2), make_request("b", 8, 1), reserve=3)
        assert loop.step().admitted == ("a",)

    def test_a_newcomer_that_leaves_exactly_the_reserve_is_let_in(self):
        loop = make_loop(make_request("a", 16, 2), make_request("b", 8, 1), reserve=2)
        assert loop.step().admitted == ("a", "b")

    def test_it_is_waived_for_who_could_never_leave_it(self):
        loop = make_loop(make_request("a", 21, 1), reserve=3)
        assert loop.run() == 2

    def test_who_it_is_waived_for_may_run_beside_others_and_take_the_last_block(self):
        loop = make_loop(make_request("a", 4, 1), make_request("b", 28, 1), reserve=3)
        assert loop.step().admitted == ("a", "b")
        assert loop.scheduler.pool.num_free == 0

    def test_who_it_is_waived_for_still_waits_for_its_own_blocks(self):
        loop = make_loop(make_request("a", 5, 1), make_request("b", 28, 1), reserve=3)
        assert [output.admitted for output in loop.steps(2)] == [("a",), ("b",)]

    def test_it_stands_for_who_could_just_leave_it(self):
        loop = make_loop(make_request("a", 1, 2), make_request("b", 20, 1), reserve=3)
        assert [output.admitted for output in loop.steps(3)] == [("a",), (), ("b",)]

    def test_it_holds_for_the_first_of_an_empty_pool_as_well(self):
        loop = make_loop(make_request("a", 20, 1), reserve=3)
        assert loop.step().admitted == ("a",)
        assert loop.scheduler.pool.num_free == 3

    def test_the_largest_reserve_serves_one_at_a_time(self):
        loop = make_loop(*(make_request(name, 1, 4) for name in "abc"), reserve=7)
        assert loop.run() == 13
        assert max(len(output.scheduled) for output in loop.outputs) == 1


WALL = {"num_blocks": 6, "slots": 2, "reserve": 3}


class TestTheSixBlockWall:
    """6 blocks of 4, reserve 3: b grows to 4 blocks, is preempted, and the reserve alone would keep it out for ever."""

    def test_with_the_waiver_b_runs_within_its_bound_of_steps(self):
        loop = make_loop(a := make_request("a", 4, 16), b := make_request("b", 4, 12), **WALL)
        steps = loop.run(max_steps=30)
        assert steps == 20
        assert (a.num_preemptions, b.num_preemptions) == (0, 1)
        assert b.output_token_ids == expected_output(b.prompt_token_ids, 12)

    def test_b_is_preempted_with_thirteen_tokens_and_needs_one_block_more_than_the_reserve_leaves(self):
        loop = make_loop(make_request("a", 4, 16), make_request("b", 4, 12), **WALL)
        loop.run(max_steps=30)
        (evicted,) = [output for output in loop.outputs if output.preempted]
        assert evicted.preempted == ("b",)
        resumed = loop.outputs[16].scheduled[0]
        assert (loop.outputs[16].released, loop.outputs[16].admitted) == (("a",), ("b",))
        assert (resumed.request_id, len(resumed.block_ids), len(resumed.token_ids)) == ("b", 4, 13)

    def test_without_the_waiver_the_auditor_names_the_missing_progress(self, monkeypatch):
        monkeypatch.setattr(Scheduler, "_reserve", lambda self, head, need, taken: self.watermark_blocks)
        loop = make_loop(make_request("a", 4, 16), make_request("b", 4, 12), **WALL)
        with pytest.raises(InvariantError, match="INV-7: the first request b stands still"):
            loop.run(max_steps=30)
