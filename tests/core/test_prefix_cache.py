"""The prefix cache from outside: what is found, what is computed, and who is told what."""

import random

import pytest

from helpers import ScriptedDrafter, ScriptedRunner, expected_output, make_loop, make_request
from millpond.core import prefix_cache
from millpond.core.request import FinishReason, Request, SamplingParams
from millpond.errors import InvalidRequestError

TEXT = tuple(range(5000, 5100))


def asking(name, prompt, max_tokens=1, *, salt=None, reads=True):
    sampling = SamplingParams(cache_salt=salt)
    return Request(name, tuple(prompt), max_tokens, sampling, reads_prefix_cache=reads)


def cached_loop(*requests, **sizes):
    return make_loop(*requests, prefix_cache=True, **sizes)


def firsts(output):
    """(request, first position, tokens) of everyone in a step."""
    return [(each.request_id, each.first_position, len(each.token_ids)) for each in output.scheduled]


def ran(loop, *requests):
    """Run the requests to their end, one after the other; returns how many tokens each found."""
    for request in requests:
        loop.add(request)
        loop.run(100)
    return [request.num_cached_tokens for request in requests]


class TestWhatIsFound:
    def test_a_second_turn_computes_only_what_came_since_and_the_rest_of_a_block(self):
        loop = cached_loop(num_blocks=16)
        first = asking("a", TEXT[:10], 7)
        loop.add(first)
        loop.run(20)
        turn = (*first.prompt_token_ids, *first.output_token_ids, *TEXT[50:53])
        loop.add(second := asking("b", turn, 4))
        # 10 tokens and 7, of which the last was never put through the model: 16 positions in 4 blocks.
        assert firsts(loop.step()) == [("b", 16, 4)]
        loop.run(20)
        assert second.output_token_ids == expected_output(turn, 4)

    @pytest.mark.parametrize("length", [7, 8, 9, 12, 13])
    def test_the_last_token_is_always_computed(self, length):
        loop = cached_loop()
        found = ran(loop, asking("a", TEXT[:length], 3), asking("b", TEXT[:length], 3))
        assert found == [0, (length - 1) // 4 * 4]

    def test_a_longer_prompt_finds_what_a_shorter_one_computed_and_the_other_way_round(self):
        loop = cached_loop()
        assert ran(loop, asking("a", TEXT[:9]), asking("b", TEXT[:17]), asking("c", TEXT[:14])) == [0, 8, 12]

    def test_a_block_alike_behind_another_one_is_not_found(self):
        loop = cached_loop()
        other = (*range(6000, 6004), *TEXT[4:9])
        assert ran(loop, asking("a", TEXT[:9]), asking("b", other)) == [0, 0]

    def test_nothing_is_found_where_there_is_no_cache(self):
        loop = make_loop()
        assert ran(loop, asking("a", TEXT[:9]), asking("b", TEXT[:9])) == [0, 0]
        assert loop.scheduler.cache is None
        assert loop.scheduler.counters.queried_tokens == 0

    def test_only_the_same_salt_finds(self):
        loop = cached_loop(num_blocks=32)
        salts = ["a", "b", None, "1", "None", "a"]
        found = ran(loop, *(asking(f"r{index}", TEXT[:9], salt=salt) for index, salt in enumerate(salts)))
        assert found == [0, 0, 0, 0, 0, 8]
        assert ran(loop, asking("again", TEXT[:9])) == [8]

    @pytest.mark.parametrize(
        ("salt", "got"), [("", "a string of 0"), (1, "1"), (["a"], r"\['a'\]"), ("x" * 1001, "a string of 1001")]
    )
    def test_a_salt_that_is_none_is_refused_by_name(self, salt, got):
        with pytest.raises(InvalidRequestError, match=f"cache_salt must be a string .* got {got}") as raised:
            SamplingParams(cache_salt=salt)
        assert raised.value.param == "cache_salt"

    def test_the_door_never_counts_a_hit_as_room(self):
        loop = cached_loop(num_blocks=4)
        assert ran(loop, asking("a", TEXT[:13])) == [0]
        with pytest.raises(InvalidRequestError, match=r"18 tokens: that needs 5 blocks .* pool has 4"):
            loop.add(asking("b", TEXT[:18]))

    def test_equal_keys_of_different_blocks_change_no_answer(self, monkeypatch):
        next_key = prefix_cache.next_key
        monkeypatch.setattr(prefix_cache, "next_key", lambda before, tokens: next_key(before, tokens) % 4)
        rng = random.Random(0)
        loop = cached_loop(num_blocks=12, slots=4, budget=16)
        requests = []
        for index in range(50):
            prompt = (*TEXT[: rng.randrange(9)], *(rng.randrange(9000, 9004) for _ in range(rng.randint(1, 12))))
            requests.append(asking(f"r{index}", prompt, 5))
            loop.add(requests[-1])
            loop.steps(rng.randrange(3))
        loop.run(300)
        for request in requests:
            assert request.output_token_ids == expected_output(request.prompt_token_ids, 5)
        assert loop.scheduler.counters.hit_tokens > 50
        assert len({key for key, _ in loop.scheduler.cache._links.values()}) <= 4 < len(loop.scheduler.cache)


class TestWhatCanBeFound:
    def findable(self, loop, prompt):
        """How many tokens of this prompt a newcomer would find now."""
        return 4 * len(loop.scheduler.cache.find(asking("probe", prompt)).block_ids)

    def test_a_chunk_that_is_in_flight_cannot_be_found(self):
        loop = cached_loop(asking("a", TEXT[:20]), budget=8)
        output = loop.schedule()
        assert self.findable(loop, TEXT) == 0
        loop.finish_step(output)
        assert self.findable(loop, TEXT) == 8
        loop.step()
        assert self.findable(loop, TEXT) == 16

    def test_what_an_aborted_request_had_half_computed_is_never_found(self):
        loop = cached_loop(asking("a", TEXT[:20]), budget=6)
        loop.step()
        output = loop.schedule()
        loop.abort("a")
        loop.finish_step(output)
        loop.run(5)
        # 6 positions came back, 12 were on the way.
        assert self.findable(loop, TEXT) == 4
        assert loop.scheduler.pool.num_free == 8

    def test_what_a_step_that_failed_computed_is_never_found(self):
        loop = cached_loop(asking("a", TEXT[:20]), budget=8)
        loop.step()
        loop.fail_step(loop.schedule())
        loop.run(5)
        assert self.findable(loop, TEXT) == 8

    def test_what_a_request_computed_in_the_step_of_its_fault_is_never_found(self):
        runner = ScriptedRunner(block_size=4, faults={"a": 0})
        loop = cached_loop(asking("a", TEXT[:9]), runner=runner)
        loop.run(5)
        assert self.findable(loop, TEXT) == 0

    def test_a_block_that_holds_a_wrong_guess_cannot_be_found(self):
        drafter = ScriptedDrafter(longest=5)
        loop = cached_loop(num_blocks=64, slots=4, drafter=drafter)
        requests = [asking(f"r{index}", TEXT[index : index + 5], 40) for index in range(4)]
        loop.add(*requests)
        while loop.scheduler.has_work:
            loop.step()
            for request in loop.scheduler.running:
                num_full = request.num_computed_tokens // 4
                tokens = request.token_ids_between(0, request.num_tokens)
                found = [loop.scheduler.cache.link_of(block_id).token_ids for block_id in request.block_ids[:num_full]]
                assert [token_id for link in found for token_id in link] == list(tokens[: 4 * num_full])
                assert not any(block_id in loop.scheduler.cache for block_id in request.block_ids[num_full:])
        learned = [(drafted, accepted) for _, drafted, accepted in drafter.learned]
        assert any(accepted < drafted for drafted, accepted in learned)
        assert sum(accepted for _, accepted in learned) > 20

    def test_the_least_recently_used_goes_first_and_of_one_request_the_deepest(self):
        loop = cached_loop(num_blocks=6)
        one, other, stranger = TEXT[:9], TEXT[20:29], make_request("c", 13, 1)
        ran(loop, asking("a", one), asking("b", other), asking("again", one))
        # Two blocks each are findable, and two were never used: of the 4 that it needs, 2 are taken from the older.
        ran(loop, stranger)
        assert [self.findable(loop, text) for text in (one, other)] == [8, 0]
        ran(loop, make_request("d", 5, 1))
        assert [self.findable(loop, text) for text in (one, stranger.prompt_token_ids)] == [4, 12]

    def test_what_is_found_is_not_evicted_to_make_room_for_the_rest(self):
        loop = cached_loop(num_blocks=4)
        assert ran(loop, asking("a", TEXT[:9]), make_request("b", 5, 1)) == [0, 0]
        # Free are a block of nobody's, then a's two; b's one was used last.
        assert ran(loop, asking("c", TEXT[:16])) == [8]
        assert loop.scheduler.counters.hit_tokens == 8

    def test_requests_that_computed_the_same_side_by_side_hold_one_block_afterwards(self):
        """Eight with the same long new prompt in one step: they do not ask the cache, and so do not wait."""
        requests = [asking(f"r{index}", TEXT[:9], 3, reads=False) for index in range(8)]
        loop = cached_loop(*requests, num_blocks=24, slots=8)
        assert [each.first_position for each in loop.step().scheduled] == [0] * 8
        assert loop.scheduler.pool.num_free == 24 - 2 - 8
        loop.run(10)
        assert [request.output_token_ids for request in requests] == [expected_output(TEXT[:9], 3)] * 8


class TestWhoIsResumed:
    def test_a_preempted_request_finds_its_own_blocks_and_holds_none_while_it_waits(self):
        """All but the deepest: that one is what it was preempted for."""
        loop = cached_loop(asking("a", TEXT[:4], 13), asking("b", TEXT[50:58], 8), num_blocks=6, budget=9)
        b = loop.scheduler.requests["b"]
        preempted = False
        while not b.is_finished:
            output = loop.step()
            if "b" in output.preempted:
                preempted = True
                kept = b.num_tokens
            if preempted and b in loop.scheduler.waiting.values():
                assert (b.block_ids, b.num_computed_tokens) == ([], 0)
            if "b" in output.admitted and preempted:
                share = next(each for each in output.scheduled if each.request_id == "b")
                assert share.first_position == b.num_cached_tokens == 8
                assert share.admission.prompt_token_ids + share.admission.output_token_ids == (
                    *b.prompt_token_ids,
                    *b.output_token_ids[: kept - 8],
                )
        assert (preempted, kept) == (True, 13)
        assert b.output_token_ids == expected_output(TEXT[50:58], 8)
        counters = loop.scheduler.counters
        assert (counters.hit_tokens, counters.queried_tokens) == (0, 12)
        assert (counters.resumed_hit_tokens, counters.recomputed_tokens) == (8, 5)

    def test_a_request_preempted_at_the_end_of_a_block_finds_that_block_too(self):
        """b ends the step with 8 of 9 tokens computed and must grow, and preempts itself: a has the only free block."""
        loop = cached_loop(asking("a", TEXT[:8], 4), asking("b", TEXT[50:58], 4), num_blocks=5)
        loop.step()
        assert loop.step().preempted == ("b",)
        loop.run(20)
        assert loop.scheduler.counters.resumed_hit_tokens == 8

    def test_the_budget_counts_what_is_left_after_the_match(self):
        loop = cached_loop(num_blocks=16, budget=5)
        ran(loop, asking("a", TEXT[:17]))
        loop.add(asking("b", TEXT[:22]), asking("c", TEXT[60:68]))
        # b lacks 6 behind the 16 that it finds, more than a step: c has to wait, although there are blocks and slots.
        assert firsts(loop.step()) == [("b", 16, 5)]
        assert loop.scheduler.requests["c"].block_ids == []
        assert firsts(loop.step()) == [("b", 21, 1), ("c", 0, 4)]


class TestCounters:
    def test_strangers_that_preempt_one_another_have_no_hits(self):
        loop = cached_loop(*(make_request(f"r{index}") for index in range(8)))
        loop.run(100)
        counters = loop.scheduler.counters
        assert counters.preemptions > 0
        assert (counters.queried_tokens, counters.hit_tokens) == (8 * 6, 0)
        assert counters.resumed_hit_tokens > 0

    def test_one_that_is_blocked_for_twenty_steps_counts_once(self):
        loop = cached_loop(asking("a", TEXT[:8], 24), num_blocks=8)
        loop.step()
        loop.add(asking("b", TEXT[:29]))
        outputs = loop.steps(20)
        assert not any(output.admitted for output in outputs)
        assert loop.scheduler.counters.queried_tokens == 8
        loop.run(20)
        counters = loop.scheduler.counters
        assert (counters.queried_tokens, counters.hit_tokens) == (8 + 29, 8)

    def test_one_that_does_not_ask_computes_everything_and_touches_no_counter(self):
        loop = cached_loop(num_blocks=32)
        for length in (5, 17, 40):
            requests = [asking(f"{length}-{index}", TEXT[:length], 2, reads=False) for index in range(3)]
            for request in requests:
                loop.add(request)
                assert firsts(loop.step()) == [(request.request_id, 0, length)]
                loop.run(10)
                assert request.output_token_ids == expected_output(TEXT[:length], 2)
        assert loop.scheduler.counters.of_prefixes == (0, 0, 0, 0)


class TestChildren:
    """Requests that begin alike and come together: the first computes what the others find one step later."""

    def test_all_but_the_first_wait_one_step_and_find_its_full_blocks(self):
        children = [asking(f"r{index}", TEXT[:9], 4) for index in range(5)]
        loop = cached_loop(*children, num_blocks=16, slots=5)
        assert firsts(loop.step()) == [("r0", 0, 9)]
        assert firsts(loop.step()) == [("r0", 9, 1), *((f"r{index}", 8, 1) for index in range(1, 5))]
        # The two full blocks once, and a block of its own for each.
        assert loop.scheduler.pool.num_free == 16 - 2 - 5
        loop.run(10)
        assert loop.scheduler.counters.iterations == 4 + 1 + 1
        assert loop.scheduler.counters.forward_tokens == 9 + 3 + 4 * (1 + 3)
        assert [child.output_token_ids for child in children] == [expected_output(TEXT[:9], 4)] * 5

    @pytest.mark.parametrize("count", [4, 5, 9])
    def test_more_children_than_slots_come_in_waves(self, count):
        children = [asking(f"r{index}", TEXT[:9], 4) for index in range(count)]
        loop = cached_loop(*children, num_blocks=16, slots=4)
        loop.run(30)
        assert [child.num_cached_tokens for child in children] == [0, *[8] * (count - 1)]
        assert {child.finish_reason for child in children} == {FinishReason.LENGTH}

    def test_three_children_in_a_pool_for_two_end_with_the_answers_they_have_alone(self):
        children = [asking(f"r{index}", TEXT[:9], 8) for index in range(3)]
        loop = cached_loop(*children, num_blocks=5, slots=3)
        loop.run(60)
        assert loop.scheduler.counters.preemptions > 0
        assert [child.output_token_ids for child in children] == [expected_output(TEXT[:9], 8)] * 3

    def test_a_long_prompt_in_chunks_keeps_its_child_waiting_until_the_last_one_at_most(self):
        loop = cached_loop(asking("a", TEXT[:22], 4), asking("b", TEXT[:22], 4), budget=8, num_blocks=16)
        assert [firsts(output) for output in loop.steps(4)] == [
            [("a", 0, 8)],
            [("a", 8, 8)],
            [("a", 16, 6)],
            [("a", 22, 1), ("b", 20, 2)],
        ]

    def test_who_has_nothing_to_gain_does_not_wait(self):
        """The second block holds the last token of both, the third prompt begins otherwise."""
        loop = cached_loop(num_blocks=16, slots=4)
        ran(loop, asking("old", TEXT[:5]))
        loop.add(asking("a", TEXT[:8], 3), asking("b", TEXT[:8], 3), asking("c", TEXT[40:48], 3))
        assert firsts(loop.step()) == [("a", 4, 4), ("b", 4, 4), ("c", 0, 8)]

    def test_the_wait_ends_with_the_one_that_computes(self):
        loop = cached_loop(asking("a", TEXT[:9], 4), asking("b", TEXT[:9], 4), num_blocks=16)
        output = loop.schedule()
        loop.abort("a")
        loop.finish_step(output)
        assert firsts(loop.step()) == [("b", 0, 9)]

    def test_a_chain_of_longer_and_longer_prompts_costs_each_one_step(self):
        loop = cached_loop(*(asking(f"r{n}", TEXT[: 4 * n + 1], 9) for n in range(1, 6)), num_blocks=40, slots=5)
        assert [output.admitted for output in loop.steps(5)] == [(f"r{n}",) for n in range(1, 6)]

    def test_another_salt_does_not_wait(self):
        loop = cached_loop(asking("a", TEXT[:9]), asking("b", TEXT[:9], salt="s"), num_blocks=16)
        assert firsts(loop.step()) == [("a", 0, 9), ("b", 0, 9)]


class TestTheWatermark:
    def test_a_findable_block_is_a_free_block(self):
        loop = cached_loop(num_blocks=8, reserve=3)
        ran(loop, asking("a", TEXT[:17]))
        assert (len(loop.scheduler.cache), loop.scheduler.pool.num_free) == (4, 8)
        loop.add(make_request("b", 20, 1))
        assert loop.step().admitted == ("b",)

    def test_what_others_hold_is_needed_no_more_but_what_nobody_holds_is(self):
        loop = cached_loop(num_blocks=8, reserve=2)
        loop.add(asking("a", TEXT[:17], 3))
        loop.step()
        # 3 blocks are free, 2 are held back: b shares 4 of its 5 and fits, c would need 2.
        loop.add(asking("b", TEXT[:18], 2), make_request("c", 5, 2))
        assert loop.step().admitted == ("b",)
        loop.run(10)
        loop.add(asking("d", TEXT[:17], 2))
        loop.add(make_request("e", 8, 1))
        # All of d's 5 blocks are free now, and count: 3 are left, of which e may have 1.
        assert loop.step().admitted == ("d",)

    def test_a_request_too_large_for_the_reserve_is_let_off_with_hits_as_without(self):
        loop = cached_loop(num_blocks=8, reserve=4)
        ran(loop, asking("a", TEXT[:17]))
        loop.add(asking("b", TEXT[:20], 1))
        assert loop.step().admitted == ("b",)


def test_a_block_is_hashed_once_however_often_it_is_looked_up(monkeypatch):
    hashed = []
    next_key = prefix_cache.next_key
    monkeypatch.setattr(
        prefix_cache, "next_key", lambda before, tokens: hashed.append(tokens) or next_key(before, tokens)
    )
    loop = cached_loop(asking("a", TEXT[:20], 8), num_blocks=8)
    loop.step()
    loop.add(asking("b", TEXT[:20], 8))
    loop.run(60)
    # Of 27 positions that have K/V 6 blocks are full; b is looked up in many steps before there is room.
    assert len(hashed) == 2 * 6


def test_a_decode_step_asks_the_cache_nothing(monkeypatch):
    loop = cached_loop(num_blocks=32, slots=4)
    loop.add(*(make_request(f"r{index}", 5, 8) for index in range(6)))
    loop.step()
    for name in ("find", "add"):
        monkeypatch.setattr(loop.scheduler.cache, name, None)
    loop.steps(2)
    with pytest.raises(TypeError):  # the eighth position fills a block
        loop.step()
