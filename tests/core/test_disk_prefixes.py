"""A scheduler with a disk beside its pool; the auditor is on, and the scripted K/V shows a block in the wrong place."""

from __future__ import annotations

import pytest

from disk_stand_in import IDENTITY, MemoryDisk
from helpers import Loop, ScriptedRunner, expected_output, make_request, make_scheduler
from millpond.core.disk_prefixes import MOST_FETCH_SECONDS, DiskPrefixes, first_key, next_key
from millpond.core.notes import Blocked
from millpond.core.policies import Priority
from millpond.core.request import FinishReason, Request
from millpond.core.sampling import SamplingParams
from millpond.core.step import Load
from millpond.errors import InvariantError


class Machine:
    """A runner and a disk that outlive schedulers; restart() gives a scheduler with an empty cache over them."""

    def __init__(self, **runner_settings):
        self.runner = ScriptedRunner(block_size=4, **runner_settings)
        self.disk = MemoryDisk(self.runner)
        self.now = 0.0

    def restart(self, **sizes):
        self.runner._kv.clear()
        self.runner.outputs.clear()
        prefixes = DiskPrefixes(self.disk, 4, lambda: self.now)
        settings = {"num_blocks": 32, "prefix_cache": True, "disk": prefixes, **sizes}
        return Loop(make_scheduler(**settings), self.runner)

    def with_prefix(self, request, **sizes):
        """The loop after a restart, the request's blocks on disk."""
        first = self.restart()
        first.add(request)
        first.run()
        return self.restart(**sizes)


def asking(name, prompt, max_tokens=3, salt=None, **settings):
    return Request(name, tuple(prompt), max_tokens, SamplingParams(cache_salt=salt), **settings)


PROMPT = tuple(range(500, 518))  # four full blocks and two tokens


def output_of(loop, name):
    return [token for update in loop.updates if update.request.request_id == name for token in update.token_ids]


def test_after_a_restart_only_what_is_behind_the_blocks_on_disk_is_computed():
    loop = Machine().with_prefix(asking("a", PROMPT))
    loop.add(asking("b", PROMPT))
    output = loop.step()
    (scheduled,) = output.scheduled
    assert (scheduled.first_position, scheduled.token_ids) == (16, PROMPT[16:])
    assert [load.block_id for load in output.loads] == list(scheduled.block_ids[:4])
    loop.run()
    assert output_of(loop, "b") == expected_output(PROMPT, 3)
    counters = loop.scheduler.counters
    assert (counters.iterations, counters.forward_tokens) == (4, 2 + 2)
    assert (counters.queried_tokens, counters.hit_tokens, counters.disk_hit_tokens) == (18, 16, 16)


def test_what_was_loaded_is_found_in_the_pool_afterwards():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    loop.add(asking("b", PROMPT))
    loop.run()
    loop.add(asking("c", PROMPT))
    loop.run()
    assert len(machine.disk.readings) == 1
    assert output_of(loop, "c") == expected_output(PROMPT, 3)
    assert (loop.scheduler.counters.hit_tokens, loop.scheduler.counters.disk_hit_tokens) == (32, 16)


def test_the_disk_goes_on_where_the_pool_ends():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    loop.add(asking("short", PROMPT[:9]))
    loop.run()
    loop.add(asking("long", PROMPT))
    output = loop.step()
    assert len(output.loads) == 2
    assert output.scheduled[0].first_position == 16
    loop.run()
    assert output_of(loop, "long") == expected_output(PROMPT, 3)


def test_the_last_token_is_always_computed():
    loop = Machine().with_prefix(asking("a", PROMPT))
    loop.add(asking("b", PROMPT[:16]))
    output = loop.step()
    assert (len(output.loads), output.scheduled[0].first_position) == (3, 12)


def test_while_its_blocks_are_on_their_way_the_head_waits_and_the_others_go_on():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    machine.disk.at_once = False
    loop.add(make_request("runs", 4, 8))
    loop.step()
    loop.add(asking("b", PROMPT), make_request("behind", 4, 2))
    for _ in range(3):
        assert [each.request_id for each in loop.step().scheduled] == ["runs"]
    (reading,) = machine.disk.readings
    assert reading.waits == [0.0, 0.0, 0.0]  # nobody was held up
    reading.come()
    output = loop.step()
    assert output.admitted == ("b", "behind")
    assert len(output.loads) == 4
    loop.run()
    assert output_of(loop, "b") == expected_output(PROMPT, 3)


def test_where_nobody_runs_it_is_waited_for_within_the_bound():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    machine.disk.at_once = False
    loop.add(asking("b", PROMPT))
    output = loop.step()
    (reading,) = machine.disk.readings
    assert reading.waits == [MOST_FETCH_SECONDS]
    # It did not come: everything is computed, at once.
    assert (output.loads, output.scheduled[0].token_ids) == ((), PROMPT)
    assert reading.is_cancelled
    loop.run()
    assert output_of(loop, "b") == expected_output(PROMPT, 3)


def test_what_has_come_when_the_time_is_over_is_used():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    machine.disk.at_once = False
    loop.add(make_request("runs", 4, 8))
    loop.step()
    loop.add(asking("b", PROMPT))
    loop.step()
    machine.disk.readings[0].come(2)
    machine.now = 0.99 * MOST_FETCH_SECONDS
    assert loop.step().admitted == ()
    machine.now = MOST_FETCH_SECONDS
    output = loop.step()
    assert (len(output.loads), output.scheduled[1].first_position) == (2, 8)
    loop.run()
    assert output_of(loop, "b") == expected_output(PROMPT, 3)


def test_a_disk_that_hangs_is_not_asked_until_it_has_answered():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    machine.disk.at_once = False
    loop.add(asking("b", PROMPT[:9]))
    loop.run()
    loop.add(asking("c", PROMPT))
    loop.step()
    (reading,) = machine.disk.readings
    assert reading.waits == [MOST_FETCH_SECONDS, 0.0]
    loop.run()
    reading.come()
    machine.disk.at_once = True
    other = machine.restart()
    other.scheduler.disk._given_up = reading
    other.add(asking("d", PROMPT))
    assert len(other.step().loads) == 4


def test_a_block_that_cannot_be_read_is_computed_and_so_are_those_behind_it():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    third = list(machine.disk.blocks)[2]
    del machine.disk.blocks[third]
    loop.add(asking("b", PROMPT))
    output = loop.step()
    assert (len(output.loads), output.scheduled[0].first_position) == (2, 8)
    loop.run()
    assert output_of(loop, "b") == expected_output(PROMPT, 3)
    assert third in machine.disk.blocks


def test_another_salt_finds_nothing_and_no_salt_is_none_of_them():
    salts = [None, "1", "None", "\ud800"]
    machine = Machine()
    for salt in salts:
        loop = machine.restart()
        loop.add(asking("a", PROMPT, salt=salt))
        loop.run()
        assert loop.scheduler.counters.hit_tokens == 0
    for salt in salts:
        loop = machine.restart()
        loop.add(asking("a", PROMPT, salt=salt))
        loop.run()
        assert loop.scheduler.counters.disk_hit_tokens == 16
    assert len({first_key(IDENTITY, salt) for salt in (*salts, "")}) == len(salts) + 1


def test_a_key_depends_on_the_model_on_all_tokens_and_on_their_places():
    keys = {
        next_key(first_key(identity, None), tokens)
        for identity in (IDENTITY, b"x" * 32)
        for tokens in ((1, 2, 3, 4), (1, 2, 4, 3), (1, 2, 3, 2**31))
    }
    assert len(keys) == 6
    assert next_key(next_key(IDENTITY, (1,)), (2,)) != next_key(IDENTITY, (1, 2))


def test_a_request_that_computes_every_position_does_not_ask_the_disk():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    loop.add(asking("b", PROMPT, reads_prefix_cache=False))
    output = loop.step()
    assert (output.loads, output.scheduled[0].token_ids, machine.disk.readings) == ((), PROMPT, [])


def test_a_step_that_fails_makes_nothing_findable_that_it_should_have_loaded():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    loop.add(asking("b", PROMPT))
    loop.fail_step(loop.schedule())
    assert len(loop.scheduler.cache) == 0
    loop.add(asking("c", PROMPT))
    loop.run()
    assert output_of(loop, "c") == expected_output(PROMPT, 3)


def test_a_fault_of_its_own_makes_nothing_findable_either():
    machine = Machine(faults={"b": 0})
    loop = machine.with_prefix(asking("a", PROMPT))
    loop.add(asking("b", PROMPT))
    loop.run()
    assert loop.updates[-1].request.finish_reason is FinishReason.ERROR
    assert len(loop.scheduler.cache) == 0


@pytest.mark.parametrize("in_flight", [False, True])
def test_one_that_is_aborted_leaves_no_block_and_no_reading(in_flight):
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    machine.disk.at_once = in_flight
    loop.add(make_request("runs", 4, 8))
    loop.step()
    loop.add(asking("b", PROMPT))
    output = loop.schedule()
    assert len(output.loads) == (4 if in_flight else 0)
    loop.abort("b")
    loop.finish_step(output)
    loop.run()
    (reading,) = machine.disk.readings
    assert reading.is_cancelled
    assert loop.scheduler.disk._fetch is None
    assert loop.scheduler.pool.num_free == 32
    assert len(loop.scheduler.cache) == 2  # those of the one that ran: 4 tokens and 7 of its output


def test_twins_load_their_blocks_once():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    loop.add(asking("b", PROMPT), asking("c", PROMPT))
    first, second = loop.step(), loop.step()
    assert (first.admitted, second.admitted) == (("b",), ("c",))
    assert (len(first.loads), len(second.loads)) == (4, 0)
    loop.run()
    assert output_of(loop, "c") == expected_output(PROMPT, 3)


def test_a_preempted_request_finds_on_disk_what_the_pool_has_lost():
    machine = Machine()
    loop = machine.restart(num_blocks=7)
    old, young = make_request("old", 8, 16), make_request("young", 8, 8)
    loop.add(old, young)
    loop.run()
    counters = loop.scheduler.counters
    assert counters.preemptions > 0
    assert counters.disk_hit_tokens > 0
    assert counters.resumed_hit_tokens >= counters.disk_hit_tokens
    assert counters.hit_tokens == 0
    for request in (old, young):
        assert request.output_token_ids == expected_output(request.prompt_token_ids, request.max_tokens)


def test_a_fetch_that_begins_behind_what_the_pool_still_has_is_begun_again():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    machine.disk.at_once = False
    disk, request = loop.scheduler.disk, asking("b", PROMPT)
    assert disk.fetched(request, 2, wait=False) is None
    assert disk.fetched(request, 1, wait=False) is None
    first, second = machine.disk.readings
    assert first.is_cancelled
    second.come()
    # Somebody has computed one more meanwhile: what is behind that is taken.
    data = disk.fetched(request, 3, wait=False)
    assert [bytes(each) for each in data] == [list(machine.disk.blocks.values())[3][1]]


def two_heads(plain_prompt=PROMPT[:2]):
    """A disk that answers when told to, and two requests that become the head by turns: b is on disk in full, and the
    other one with the prompt that is given."""
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    machine.disk.at_once = False
    return machine, loop.scheduler.disk, asking("b", PROMPT), asking("c", plain_prompt)


def test_what_one_head_waits_for_is_not_dropped_by_another_that_has_nothing_on_disk():
    machine, disk, request, other = two_heads()
    assert disk.fetched(request, 0, wait=False) is None
    assert disk.fetched(other, 0, wait=False) == ()
    disk.forget(other)
    (reading,) = machine.disk.readings
    assert not reading.is_cancelled
    reading.come()
    assert len(disk.fetched(request, 0, wait=False)) == 4
    assert len(machine.disk.readings) == 1


def test_who_is_passed_by_another_that_reads_waits_no_longer_in_all_than_the_bound():
    machine, disk, request, other = two_heads(PROMPT[:9])
    assert disk.fetched(request, 0, wait=False) is None
    machine.now = 0.75 * MOST_FETCH_SECONDS
    assert disk.fetched(other, 0, wait=False) is None
    machine.disk.readings[1].come()
    assert len(disk.fetched(other, 0, wait=False)) == 2
    assert disk.fetched(request, 0, wait=False) is None  # read for anew
    machine.disk.readings[2].come(3)
    machine.now = MOST_FETCH_SECONDS
    assert len(disk.fetched(request, 0, wait=False)) == 3


@pytest.mark.parametrize("ends", [True, False])
def test_once_it_has_begun_or_ended_it_may_wait_as_long_again(ends):
    machine, disk, request, _ = two_heads()
    assert disk.fetched(request, 0, wait=False) is None
    if ends:
        disk.forget(request)
    else:
        machine.disk.readings[0].come()
        assert len(disk.fetched(request, 0, wait=False)) == 4
    machine.now = 10 * MOST_FETCH_SECONDS
    assert disk.fetched(request, 0, wait=False) is None


def test_what_was_found_and_what_was_loaded_counts_as_used():
    machine = Machine()
    loop = machine.with_prefix(asking("a", PROMPT))
    loop.add(asking("b", PROMPT[:9]))
    loop.run()
    loop.add(asking("c", PROMPT))
    loop.step()
    keys = [
        key
        for key, _ in sorted(
            ((key, block.depth) for key, (block, _) in machine.disk.blocks.items()), key=lambda it: it[1]
        )
    ]
    assert machine.disk.used[-4:] == list(zip(keys[:4], range(4), strict=True))


def test_a_block_is_withdrawn_before_it_is_written():
    machine = Machine()
    loop = machine.restart(num_blocks=5)
    loop.add(make_request("a", 8, 1))
    loop.run()
    assert machine.disk.withdrawn == []
    loop.add(make_request("b", 17, 1))
    loop.step()
    assert sorted(machine.disk.withdrawn) == [0, 1]


def test_an_end_is_passed_on_to_the_store():
    machine = Machine()
    machine.restart().scheduler.disk.close()
    assert machine.disk.is_closed


class TestTheAuditor:
    def planted(self, change):
        loop = Machine().with_prefix(asking("a", PROMPT))
        loop.add(make_request("runs", 4, 8))
        loop.step()
        loop.add(asking("b", PROMPT))
        output = loop.scheduler.schedule()
        loop.scheduler.loads = loads = change(loop, output)
        with pytest.raises(InvariantError) as caught:
            loop.auditor.after_schedule(output.__class__(output.step, output.scheduled, output.admitted, loads=loads))
        return str(caught.value)

    def test_names_a_block_that_is_said_to_be_loaded_and_is_not(self):
        text = self.planted(lambda loop, output: output.loads[1:])
        assert text.startswith("INV-10: block")
        assert "number 0 of request b" in text

    def test_names_a_load_into_a_block_of_somebody_who_runs(self):
        text = self.planted(lambda loop, output: (*output.loads, Load(output.scheduled[0].block_ids[-1], b"")))
        assert text.startswith("INV-9: block")
        assert text.endswith("but is in front of nobody who begins in it")

    def test_names_a_load_into_a_block_that_somebody_else_has_too(self):
        loop = Machine().with_prefix(asking("a", PROMPT))
        loop.add(asking("b", PROMPT))
        output = loop.schedule()
        loop.scheduler.pool.share((output.loads[1].block_id,))
        with pytest.raises(InvariantError, match=r"INV-9: block \d+ is loaded in step 0, but has 2 holders, not 1"):
            loop.auditor._check_loads(output)


class TestTheFirstThatWaitsForTheDisk:
    """INV-7: it may stand still while others run, for that and for nothing else."""

    def decided(self):
        """A step in which b, the first in order, waits for its blocks, and another runs."""
        machine = Machine()
        loop = machine.with_prefix(asking("a", PROMPT))
        loop.scheduler.policy = Priority()
        machine.disk.at_once = False
        loop.add(make_request("runs", 4, 8, priority=1))
        loop.step()
        loop.add(asking("b", PROMPT, priority=-1))
        output = loop.scheduler.schedule()
        assert [each.request_id for each in output.scheduled] == ["runs"]
        assert loop.scheduler.notes.blocked == Blocked("b", "disk", 1, 0, 1)
        return loop, output

    def test_is_not_starved(self):
        loop, output = self.decided()
        loop.auditor.after_schedule(output)

    @pytest.mark.parametrize(
        "noted",
        [None, Blocked("b", "blocks", 1, 0, 1), Blocked("b", "slots", 1, 0, 1), Blocked("runs", "disk", 1, 0, 1)],
    )
    def test_is_where_it_is_not_the_disk_that_it_waits_for(self, noted):
        loop, output = self.decided()
        loop.scheduler.notes.blocked = noted
        with pytest.raises(InvariantError, match=r"INV-7: the first request b stands still, step 1 runs .'runs'."):
            loop.auditor.after_schedule(output)
