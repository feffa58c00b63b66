"""Ten thousand requests over tiny pools, the auditor on after every step, each step that of the dumb reference."""

import functools
import random
from dataclasses import dataclass, field

import pytest

from helpers import Loop, ScriptedDrafter, ScriptedRunner, expected_output, make_request, make_scheduler
from millpond.core.invariants import check_same_decisions
from millpond.core.request import FinishReason, Request, SamplingParams
from reference_scheduler import Lockstep

SEEDS = range(40)
NUM_REQUESTS = {"plain": 250, "drafts": 60, "cache": 60, "cache and drafts": 60}  # ten thousand over all seeds of plain
TEXTS = [tuple(range(first, first + 10)) for first in (50_000, 60_000)]  # how prompts begin, where there is a cache
MOST_WAITING = 6


@dataclass
class Soak:
    """One seeded run: arrivals, aborts at rest and in flight, faults, and stop tokens that the hash happens to hit."""

    seed: int
    kind: str
    requests: dict[str, Request] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return NUM_REQUESTS[self.kind]

    @property
    def drafts(self) -> bool:
        return "drafts" in self.kind

    @property
    def cache(self) -> bool:
        return "cache" in self.kind

    def run(self) -> Loop:
        rng = random.Random(self.seed)
        loop = self._make_loop(rng)
        bound = 0
        steps = 0
        for index in range(self.num_requests):
            request = self._make_request(rng, loop, f"r{index}")
            loop.add(request)
            bound += request.num_prompt_tokens + request.max_tokens
            num_steps = rng.choice([0, 0, 1, 2, 4])
            while num_steps > 0 or loop.scheduler.num_waiting > MOST_WAITING:
                self._step(rng, loop)
                steps += loop.outputs[-1].num_tokens > 0
                num_steps -= 1
        steps += loop.run(max_steps=bound + 1)
        # Each step moves the oldest request on by one token at least, and one more step only releases.
        assert steps <= bound + 1
        if isinstance(loop, Lockstep):
            assert len(loop.outputs) == loop.reference.num_steps
        return loop

    def _make_loop(self, rng: random.Random) -> Loop:
        num_blocks, block_size = rng.randint(2, 9), rng.randint(1, 5)
        scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            slots=rng.randint(2, 6),
            budget=rng.choice([None, 1, 2, 3, 7, 16]),
            reserve=rng.randrange(num_blocks),
            drafter=ScriptedDrafter() if self.drafts else None,
            prefix_cache=self.cache,
        )
        faults = {f"r{rng.randrange(self.num_requests)}": rng.randrange(3) for _ in range(3)}
        runner = ScriptedRunner(block_size=block_size, faults=faults)
        # With guesses a step's tokens depend on what is guessed, which the reference knows nothing of.
        return Loop(scheduler, runner) if self.drafts else Lockstep(scheduler, runner)

    def _make_request(self, rng: random.Random, loop: Loop, name: str) -> Request:
        scheduler = loop.scheduler
        room = scheduler.pool.num_blocks * scheduler.block_size
        length = rng.randint(1, min(room, 10))
        max_tokens = rng.randint(1, min(16, scheduler.door.max_tokens_that_fit(length)))
        stops = frozenset(range(100, 1000, 20)) if rng.random() < 0.3 else frozenset()
        self.requests[name] = request = make_request(name, length, max_tokens, stop_token_ids=stops)
        if self.cache:
            num_shared = rng.randint(0, length)
            request.prompt_token_ids = rng.choice(TEXTS)[:num_shared] + request.prompt_token_ids[num_shared:]
            request.sampling = SamplingParams(cache_salt=rng.choice([None, None, None, "a"]))
            request.reads_prefix_cache = rng.random() < 0.9
        return request

    def _step(self, rng: random.Random, loop: Loop) -> None:
        self._maybe_abort(rng, loop)
        output = loop.schedule()
        self._maybe_abort(rng, loop)
        loop.finish_step(output)

    def _maybe_abort(self, rng: random.Random, loop: Loop) -> None:
        if rng.random() < 0.05:
            loop.abort(rng.choice(list(self.requests)))


@functools.cache
def soaked(seed: int, kind: str) -> tuple[Soak, Loop]:
    soak = Soak(seed, kind)
    return soak, soak.run()


every_kind = pytest.mark.parametrize("kind", NUM_REQUESTS)


@every_kind
@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_with_the_answer_it_would_have_had_alone(seed, kind):
    soak, loop = soaked(seed, kind)
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.num_blocks
    assert sorted(loop.scheduler.free_slots) == list(range(loop.scheduler.max_num_seqs))
    for request in soak.requests.values():
        alone = expected_output(request.prompt_token_ids, request.max_tokens)
        assert request.output_token_ids == alone[: request.num_output_tokens]
        if request.finish_reason is FinishReason.LENGTH:
            assert request.num_output_tokens == request.max_tokens
        if request.finish_reason is FinishReason.STOP:
            assert request.output_token_ids[-1] in request.stop_token_ids


@every_kind
def test_the_soak_passes_through_every_rare_path(kind):
    """A soak that never preempts or aborts would prove nothing."""
    soaks, loops = zip(*(soaked(seed, kind) for seed in SEEDS), strict=True)
    drafts, cache = soaks[0].drafts, soaks[0].cache
    reasons = {request.finish_reason for soak in soaks for request in soak.requests.values()}
    assert reasons == set(FinishReason)
    counters = [loop.scheduler.counters for loop in loops]
    few = kind != "plain"
    assert sum(each.preemptions for each in counters) > (100 if few else 200)
    assert sum(each.thrashed_admissions for each in counters) > 50
    chunks = sum(not share.samples for loop in loops for output in loop.outputs for share in output.scheduled)
    assert chunks > (500 if few else 1000)
    assert sum(len(soak.requests) for soak in soaks) == 40 * NUM_REQUESTS[kind] >= (2_400 if few else 10_000)
    assert (sum(each.hit_tokens for each in counters) > 300) is cache
    assert (sum(each.resumed_hit_tokens for each in counters) > 200) is cache
    assert (sum(each.accepted_tokens for each in counters) > 500) is drafts
    assert (sum(each.drafted_tokens - each.accepted_tokens for each in counters) > 500) is drafts


@every_kind
@pytest.mark.parametrize("seed", range(2))
def test_the_same_requests_in_the_same_order_give_the_same_decisions(seed, kind):
    check_same_decisions(soaked(seed, kind)[1].outputs, Soak(seed, kind).run().outputs)
