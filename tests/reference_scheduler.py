"""The scheduler's rules read aloud: no ids of blocks or slots, every number counted afresh from one list."""

from __future__ import annotations

from dataclasses import dataclass

from helpers import Loop, ScriptedRunner, expected_output
from millpond.core.request import Request
from millpond.core.scheduler import Scheduler
from millpond.core.step import SchedulerOutput


@dataclass
class Entry:
    """A request as numbers. ends_at is how many tokens it has when it ends, faults_at when it faults instead.

    text is all that it will ever say, prompt and answer, behind its salt. reads says whether it asks the prefix cache.
    """

    name: str
    tokens: int
    ends_at: int
    faults_at: int | None = None
    computed: int = 0
    blocks: int = 0
    state: str = "waiting"
    text: tuple = ()
    reads: bool = True
    is_new: bool = True


@dataclass
class Decision:
    """What a step does, with (name, first position, tokens, blocks, samples) of each request that runs."""

    released: tuple
    preempted: tuple
    admitted: tuple
    shares: tuple

    @classmethod
    def of(cls, output: SchedulerOutput) -> Decision:
        shares = [
            (each.request_id, each.first_position, len(each.token_ids), len(each.block_ids), each.samples)
            for each in output.scheduled
        ]
        return cls(output.released, output.preempted, output.admitted, tuple(shares))


class ReferenceScheduler:
    def __init__(self, sizes_of: Scheduler):
        self.num_blocks, self.block_size = sizes_of.pool.num_blocks, sizes_of.block_size
        self.slots, self.budget = sizes_of.max_num_seqs, sizes_of.max_num_batched_tokens
        self.reserve = sizes_of.watermark_blocks
        self.has_cache = sizes_of.cache is not None
        self.idle = []  # texts up to the end of each findable block that nobody holds, the next to go first
        self.hits = {"queried": 0, "hit": 0, "resumed": 0}
        self.entries = []  # in arrival order, ended ones until they are released
        self.ended = []  # in the order in which they ended
        self.shares = ()
        self.num_steps = 0

    def those(self, state):
        return [entry for entry in self.entries if entry.state == state]

    def free_blocks(self):
        """A block that several hold is one block: with the cache, that of the same text up to its end."""
        held = {text for entry in self.entries for text in self.full_blocks(entry)}
        own = sum(entry.blocks - len(self.full_blocks(entry)) for entry in self.entries)
        return self.num_blocks - own - len(held)

    def text_up_to(self, entry, num_blocks):
        return entry.text[: 1 + num_blocks * self.block_size]

    def full_blocks(self, entry):
        """What names each of the blocks that it holds and has computed in full."""
        if not self.has_cache or not entry.blocks:
            return []
        return [self.text_up_to(entry, number) for number in range(1, entry.computed // self.block_size + 1)]

    def findable(self):
        return {text for entry in self.entries for text in self.full_blocks(entry)} | set(self.idle)

    def num_found(self, entry):
        """How many blocks of a waiting request can be found, the one of its last token never."""
        number = 0
        while (number + 1) * self.block_size < entry.tokens and self.text_up_to(entry, number + 1) in self.findable():
            number += 1
        return number if entry.reads else 0

    def give_back(self, entry):
        texts = self.full_blocks(entry)
        entry.blocks, entry.computed = 0, 0
        held = {text for other in self.entries for text in self.full_blocks(other)}
        self.idle += [text for text in reversed(texts) if text not in held]

    def evict(self):
        """Blocks that cannot be found are handed out before those that can."""
        while len(self.idle) > self.free_blocks():
            self.idle.pop(0)

    def is_being_computed(self, entry, number):
        """Whether a prefilling request has this block of the entry in front of it."""
        text = self.text_up_to(entry, number)
        return any(
            other.tokens - other.computed > 1
            and other.reads
            and other.tokens > number * self.block_size
            and self.text_up_to(other, number) == text
            for other in self.those("running")
        )

    def blocks_for(self, entry):
        blocks = 0
        while blocks * self.block_size < entry.tokens:
            blocks += 1
        return blocks

    def add(self, name, num_prompt_tokens, num_output_tokens, faults_after=None, text=(), reads=True):
        faults_at = None if faults_after is None else num_prompt_tokens + faults_after
        ends_at = num_prompt_tokens + num_output_tokens
        self.entries.append(Entry(name, num_prompt_tokens, ends_at, faults_at, text=text, reads=reads))

    def end(self, entry):
        entry.state = "ended"
        self.ended.append(entry)

    def abort(self, name):
        for entry in self.entries:
            if entry.name == name and entry.state != "ended":
                self.end(entry)
                return True
        return False

    def schedule(self, prefill_budget=None):
        released = self.release()
        preempted = self.grow()
        budget = self.budget_of_step(prefill_budget)
        admitted = self.admit(budget)
        self.shares = self.share_out(budget)
        self.num_steps += 1
        return Decision(released, preempted, admitted, self.shares)

    def release(self):
        released = tuple(entry.name for entry in self.ended)
        for entry in self.ended:
            self.give_back(entry)
        self.entries = [entry for entry in self.entries if entry.state != "ended"]
        self.ended = []
        return released

    def grow(self):
        preempted = []
        for entry in self.those("running"):
            while entry.state == "running" and self.blocks_for(entry) - entry.blocks > self.free_blocks():
                victim = self.those("running")[-1]
                self.give_back(victim)
                victim.state, victim.is_new = "waiting", False
                preempted.append(victim.name)
            if entry.state == "running":
                entry.blocks = self.blocks_for(entry)
                self.evict()
        return tuple(preempted)

    def budget_of_step(self, prefill_budget):
        """One token for each that runs already, the prompts' share on top, and never more than a step may have."""
        if prefill_budget is None:
            return self.budget
        paced = len(self.those("running")) + prefill_budget
        return paced if self.budget is None else min(self.budget, paced)

    def admit(self, budget):
        admitted = []
        for entry in self.those("waiting"):
            need = self.blocks_for(entry)
            could_leave_the_reserve = need + self.reserve <= self.num_blocks
            reserve = self.reserve if could_leave_the_reserve else 0
            wanted = sum(each.tokens - each.computed for each in self.those("running"))
            is_spent = budget is not None and wanted >= budget
            if len(self.those("running")) == self.slots or is_spent:
                break
            number = self.num_found(entry)
            most = (entry.tokens - 1) // self.block_size
            if self.has_cache and entry.reads and number < most and self.is_being_computed(entry, number + 1):
                break
            found = [self.text_up_to(entry, each) for each in range(1, number + 1)]
            need -= sum(text not in self.idle for text in found)
            if need + reserve > self.free_blocks():
                break
            self.idle = [text for text in self.idle if text not in found]
            entry.state, entry.blocks, entry.computed = "running", self.blocks_for(entry), number * self.block_size
            self.evict()
            self.count(entry)
            admitted.append(entry.name)
        return tuple(admitted)

    def count(self, entry):
        if not self.has_cache:
            return
        if not entry.is_new:
            self.hits["resumed"] += entry.computed
        elif entry.reads:
            self.hits["queried"] += entry.tokens
            self.hits["hit"] += entry.computed

    def share_out(self, budget):
        shares, given = [], 0
        for entry in self.those("running"):
            share = missing = entry.tokens - entry.computed
            if budget is not None:
                share = min(missing, budget - given)
            given += share
            shares.append((entry.name, entry.computed, share, entry.blocks, share == missing))
        return tuple(shares)

    def finish_step(self, failed=False):
        for name, _, share, _, samples in self.shares:
            (entry,) = [entry for entry in self.entries if entry.name == name]
            if entry.state == "ended":
                continue
            if failed or (samples and entry.tokens == entry.faults_at):
                self.end(entry)
                continue
            entry.computed += share
            entry.tokens += samples
            if entry.tokens == entry.ends_at:
                self.end(entry)
        held = {text for entry in self.entries for text in self.full_blocks(entry)}
        self.idle = [text for text in self.idle if text not in held]


class Lockstep(Loop):
    """A Loop that asks the reference as well, and compares every decision and every end."""

    def __init__(self, scheduler: Scheduler, runner: ScriptedRunner | None = None) -> None:
        super().__init__(scheduler, runner)
        self.reference = ReferenceScheduler(scheduler)

    def add(self, *requests: Request) -> None:
        for request in requests:
            super().add(request)
            answer = expected_output(request.prompt_token_ids, request.max_tokens)
            ends = [index for index, token_id in enumerate(answer, 1) if token_id in request.stop_token_ids]
            num_output_tokens = min([*ends, request.max_tokens])
            text = (request.sampling.cache_salt, *request.prompt_token_ids, *answer)
            self.reference.add(
                request.request_id,
                request.num_prompt_tokens,
                num_output_tokens,
                self.runner.faults.get(request.request_id),
                text,
                request.reads_prefix_cache,
            )

    def abort(self, request_id: str) -> bool:
        aborted = super().abort(request_id)
        assert aborted is self.reference.abort(request_id)
        return aborted

    def schedule(self, prefill_budget: int | None = None) -> SchedulerOutput:
        output = super().schedule(prefill_budget)
        ours, theirs = Decision.of(output), self.reference.schedule(prefill_budget)
        assert ours == theirs, f"step {output.step} is {ours}, the reference's {theirs}"
        return output

    def finish_step(self, output: SchedulerOutput) -> None:
        super().finish_step(output)
        self.reference.finish_step()
        self.compare()

    def fail_step(self, output: SchedulerOutput) -> None:
        super().fail_step(output)
        self.reference.finish_step(failed=True)
        self.compare()

    def compare(self) -> None:
        scheduler, reference = self.scheduler, self.reference
        for state, entries in (("running", scheduler.running), ("waiting", scheduler.waiting.values())):
            names = [(entry.name, entry.tokens, entry.blocks) for entry in reference.those(state)]
            assert [(each.request_id, each.num_tokens, len(each.block_ids)) for each in entries] == names
        assert [request.request_id for request in scheduler.finished] == [entry.name for entry in reference.ended]
        assert scheduler.pool.num_free == reference.free_blocks()
        if scheduler.cache is not None:
            assert len(scheduler.cache) == len(reference.findable())
            counters = scheduler.counters
            counted = [counters.queried_tokens, counters.hit_tokens, counters.resumed_hit_tokens]
            assert counted == list(reference.hits.values())
        assert scheduler.has_work is bool(reference.entries)
