"""Every reachable state of very small pools: each interleaving of arrivals, steps and aborts, in flight ones too.

Block numbers and slots are left out of a state, since renaming them changes no decision. From every state
found, stepping alone must drain the scheduler.
"""

import copy
from collections import deque
from dataclasses import dataclass, field

import pytest

from helpers import Loop, ScriptedDrafter, make_request, make_scheduler
from millpond.core.block_pool import blocks_for_length
from millpond.core.request import RequestState
from millpond.core.scheduler import Scheduler
from millpond.errors import InvariantError


@dataclass
class Explorer:
    """Breadth first from the empty scheduler, so that the first trace to a fault is a shortest one."""

    sizes: dict
    shapes: list  # (prompt tokens, max_tokens) of each request, in arrival order
    drafts: bool = False
    drains_to: dict = field(default_factory=dict)

    def explore(self):
        start = Loop(make_scheduler(**self.sizes, drafter=ScriptedDrafter() if self.drafts else None))
        seen = {self._key(start)}
        queue = deque([(start, ())])
        while queue:
            loop, trace = queue.popleft()
            for action in self._actions(loop):
                after = copy.deepcopy(loop)
                try:
                    self._do(after, action)
                except InvariantError as broken:
                    raise AssertionError(f"{self.sizes} {self.shapes}: {[*trace, action]}: {broken}") from broken
                key = self._key(after)
                if action == ("step", None):
                    self.drains_to[self._key(loop)] = key
                if key not in seen:
                    seen.add(key)
                    queue.append((after, (*trace, action)))
        for key in seen:
            self._check_drains(key)
        return len(seen)

    def _check_drains(self, key):
        passed = set()
        while key in self.drains_to:
            assert key not in passed, f"{self.sizes} {self.shapes}: spins for ever at {key}"
            passed.add(key)
            key = self.drains_to[key]

    def _actions(self, loop):
        alive = [name for name, request in loop.scheduler.requests.items() if not request.is_finished]
        if loop.scheduler.has_work:
            yield ("step", None)
            yield from (("step", name) for name in alive)
        yield from (("abort", name) for name in alive)
        if loop.scheduler._num_arrivals < len(self.shapes):
            yield ("add", None)

    def _do(self, loop, action):
        verb, name = action
        if verb == "add":
            index = loop.scheduler._num_arrivals
            loop.add(make_request("abcdef"[index], *self.shapes[index]))
        elif verb == "abort":
            loop.scheduler.abort(name)
        else:
            output = loop.schedule()
            if name is not None:
                loop.scheduler.abort(name)
            loop.finish_step(output)
        loop.outputs.clear()
        loop.updates.clear()
        loop.runner.outputs.clear()
        loop.runner.admissions.clear()
        if self.drafts:
            loop.scheduler.drafter.learned.clear()

    def _key(self, loop):
        scheduler = loop.scheduler
        requests = tuple(
            (name, request.state, request.num_output_tokens, request.num_computed_tokens, len(request.block_ids))
            for name, request in scheduler.requests.items()
        )
        return scheduler._num_arrivals, scheduler.pool.num_free, requests


CASES = [
    ({"num_blocks": 3, "block_size": 1, "slots": 2, "reserve": 0}, [(1, 3), (1, 3), (2, 1)]),
    ({"num_blocks": 3, "block_size": 1, "slots": 2, "reserve": 2}, [(1, 3), (1, 3), (2, 1)]),
    ({"num_blocks": 3, "block_size": 2, "slots": 3, "reserve": 1}, [(2, 3), (1, 4), (3, 2)]),
    ({"num_blocks": 4, "block_size": 1, "slots": 2, "reserve": 1, "budget": 2}, [(2, 2), (1, 3), (2, 1)]),
    ({"num_blocks": 4, "block_size": 1, "slots": 3, "reserve": 3}, [(1, 4), (1, 3)]),
    ({"num_blocks": 4, "block_size": 1, "slots": 3, "reserve": 1}, [(1, 4), (2, 3), (1, 2)]),
    ({"num_blocks": 3, "block_size": 2, "slots": 2, "reserve": 1, "budget": 2}, [(3, 4), (4, 2), (1, 4)]),
    ({"num_blocks": 4, "block_size": 2, "slots": 2, "reserve": 0, "budget": 1}, [(3, 2), (2, 2)]),
]


# With room to guess in: a block or two more, and more tokens to generate.
DRAFT_CASES = [
    ({"num_blocks": 5, "block_size": 1, "slots": 2, "reserve": 1}, [(1, 5), (2, 3), (1, 4)]),
    ({"num_blocks": 4, "block_size": 2, "slots": 2, "reserve": 0, "budget": 3}, [(2, 6), (3, 4), (1, 5)]),
    ({"num_blocks": 3, "block_size": 2, "slots": 3, "reserve": 2}, [(1, 6), (1, 5), (2, 4)]),
]


def explore_all(drafts=False):
    return [Explorer(sizes, shapes, drafts).explore() for sizes, shapes in (DRAFT_CASES if drafts else CASES)]


@pytest.mark.parametrize(("sizes", "shapes"), CASES)
def test_every_reachable_state_keeps_the_invariants_and_drains(sizes, shapes):
    assert Explorer(sizes, shapes).explore() >= 50


@pytest.mark.parametrize(("sizes", "shapes"), [*CASES, *DRAFT_CASES])
def test_every_state_that_is_reachable_with_drafts_keeps_the_invariants_and_drains(sizes, shapes):
    assert Explorer(sizes, shapes, drafts=True).explore() >= 30


def without_waiver(monkeypatch):
    monkeypatch.setattr(Scheduler, "_reserve", lambda self, need: self.watermark_blocks)


def oldest_as_victim(monkeypatch):
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, victim: preempt(self, self.running[0]))


def growth_under_the_watermark(monkeypatch):
    grow = Scheduler._grow

    def grow_with_a_reserve(self):
        allocate = self.pool.allocate
        self.pool.allocate = lambda n: allocate(n) if n <= max(0, self.pool.num_free - self.watermark_blocks) else None
        preempted = grow(self)
        del self.pool.allocate
        return preempted

    monkeypatch.setattr(Scheduler, "_grow", grow_with_a_reserve)


def blocks_released_twice(monkeypatch):
    give_back = Scheduler._give_back

    def give_back_twice(self, request):
        block_ids = list(request.block_ids)
        give_back(self, request)
        self.pool.release(block_ids)

    monkeypatch.setattr(Scheduler, "_give_back", give_back_twice)


def admission_for_the_next_chunk(monkeypatch):
    def blocks_needed(self, request):
        chunk = self.max_num_batched_tokens or 1
        length = min(chunk, request.num_tokens) if request.state is RequestState.WAITING else request.num_tokens
        return blocks_for_length(length, self.block_size)

    monkeypatch.setattr(Scheduler, "_blocks_needed", blocks_needed)


@pytest.mark.parametrize(
    ("plant", "finding"),
    [
        (without_waiver, "INV-[57]: .*"),
        (oldest_as_victim, "INV-[47]"),
        (growth_under_the_watermark, "INV-7: the oldest request a was preempted"),
        (blocks_released_twice, "holders released, but it has 0"),
        (admission_for_the_next_chunk, "INV-3"),
    ],
)
def test_a_planted_fault_is_found_with_a_trace_to_it(monkeypatch, plant, finding):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=rf"\[\('add', None\), .*\]: .*{finding}"):
        explore_all()


def wrong_guesses_counted_as_computed(monkeypatch):
    take_in = Scheduler._take_in

    def take_all_in(self, request, token_ids):
        num_drafts = len(request.draft_token_ids)
        taken = take_in(self, request, token_ids)
        request.num_computed_tokens += num_drafts - (len(taken) - 1 if num_drafts else 0)
        return taken

    monkeypatch.setattr(Scheduler, "_take_in", take_all_in)


def blocks_of_wrong_guesses_kept(monkeypatch):
    monkeypatch.setattr(Scheduler, "_trim", lambda self, request: None)


def guesses_beyond_max_tokens(monkeypatch):
    draft = ScriptedDrafter.draft
    monkeypatch.setattr(ScriptedDrafter, "draft", lambda self, request, most, load: draft(self, request, 5, load))


@pytest.mark.parametrize(
    ("plant", "finding"),
    [
        (wrong_guesses_counted_as_computed, "INV-[36]"),
        (blocks_of_wrong_guesses_kept, "INV-3"),
        (guesses_beyond_max_tokens, "INV-[36]"),
    ],
)
def test_a_fault_in_drafting_is_found_with_a_trace_to_it(monkeypatch, plant, finding):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=rf"\[\('add', None\), .*\]: .*{finding}"):
        explore_all(drafts=True)
