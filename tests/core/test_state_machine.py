"""Hypothesis drives the scheduler and the dumb reference of its rules side by side: every decision must be the same."""

from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from helpers import ScriptedRunner, expected_output, make_request, make_scheduler
from millpond.core.invariants import Auditor
from millpond.core.request import FinishReason, Request, SamplingParams
from millpond.core.scheduler import Scheduler
from millpond.errors import InvalidRequestError
from millpond.lab.faults import AdmissionForNextChunk, GrowthUnderWatermark, OldestAsVictim, WithoutWaiver
from reference_scheduler import Lockstep

TEXT = tuple(range(50_000, 50_012))  # how prompts begin
PLACES = st.integers(0, 100)  # of a request among all there have been, counted round


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals that fit and that do not, aborts at rest and in flight, faults, stop tokens, steps that fail."""

    def __init__(self):
        super().__init__()
        self.requests = []
        self.loop = None
        self.is_broken = False

    @contextmanager
    def acting(self):
        """What raises in here is the finding; the teardown would only bury it under another."""
        self.is_broken = True
        yield
        self.is_broken = False

    @initialize(
        num_blocks=st.integers(1, 7),
        block_size=st.integers(1, 4),
        slots=st.integers(1, 5),
        budget=st.none() | st.integers(1, 9),
        reserve=PLACES,
        prefix_cache=st.booleans(),
    )
    def start(self, num_blocks, block_size, slots, budget, reserve, prefix_cache):
        scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            slots=slots,
            budget=budget,
            reserve=reserve % num_blocks,
            prefix_cache=prefix_cache,
        )
        self.loop = Lockstep(scheduler, ScriptedRunner(block_size=block_size))

    @rule(
        length=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        stops=st.booleans(),
        faults_after=st.none() | st.none() | st.integers(0, 5),
        num_shared=st.integers(0, 12),
        salt=st.none() | st.none() | st.just("s"),
    )
    def add(self, length, max_tokens, stops, faults_after, num_shared, salt):
        name = f"r{len(self.requests)}"
        stop_token_ids = frozenset(range(100, 1000, 5)) if stops else frozenset()
        sampling = SamplingParams(cache_salt=salt)
        request = make_request(name, length, max_tokens, stop_token_ids=stop_token_ids, sampling=sampling)
        request.prompt_token_ids = TEXT[: min(num_shared, length)] + request.prompt_token_ids[num_shared:]
        scheduler = self.loop.scheduler
        if length + max_tokens - 1 > scheduler.pool.num_blocks * scheduler.block_size:
            with pytest.raises(InvalidRequestError):
                self.loop.add(request)
            return
        if faults_after is not None:
            self.loop.runner.faults[name] = faults_after
        with self.acting():
            self.loop.add(request)
        self.requests.append(request)

    @rule(place=PLACES)
    def abort(self, place):
        if self.requests:
            self.loop.abort(self.requests[place % len(self.requests)].request_id)

    @rule(aborts=st.lists(PLACES, max_size=2), failed=st.integers(0, 9).map(lambda number: number == 9))
    def step(self, aborts, failed):
        with self.acting():
            output = self.loop.schedule()
            for place in aborts:
                self.abort(place)
            if failed:
                self.loop.fail_step(output)
            else:
                self.loop.finish_step(output)

    @rule(count=st.integers(2, 6))
    def steps(self, count):
        with self.acting():
            self.loop.steps(count)

    def teardown(self):
        if self.loop is None or self.is_broken:
            return
        left = sum(
            request.num_prompt_tokens + request.max_tokens for request in self.requests if not request.is_finished
        )
        # The oldest moves on in every step, by one token at least, and one more step only releases.
        self.loop.run(max_steps=left + 1)
        for request in self.requests:
            alone = expected_output(request.prompt_token_ids, request.max_tokens)
            assert request.output_token_ids == alone[: request.num_output_tokens]
            if request.finish_reason is FinishReason.LENGTH:
                assert request.num_output_tokens == request.max_tokens


SchedulerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize(
    ("kind", "budget"),
    [(WithoutWaiver, None), (GrowthUnderWatermark, None), (OldestAsVictim, None), (AdmissionForNextChunk, 4)],
)
def test_the_reference_sees_a_planted_fault_with_no_auditor(monkeypatch, kind, budget):
    for check in ("after_schedule", "after_update"):
        monkeypatch.setattr(Auditor, check, lambda self, message: None)
    scheduler = kind(
        num_blocks=6,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=budget,
        max_model_len=100,
        watermark_blocks=3,
    )
    loop = Lockstep(scheduler)
    loop.add(make_request("a", 4, 16), make_request("b", 4, 12))
    with pytest.raises(AssertionError, match=r"step .* is Decision.*, the reference's Decision"):
        loop.run(60)


class PublishesNothing(Scheduler):
    def _publish(self, request):
        request.publish_at += self.block_size


class WaitsForNobody(Scheduler):
    def _find(self, request):
        return super()._find(request)._replace(missing=None)


class ForgetsWhatIsFree(Scheduler):
    def _give_back(self, request):
        super()._give_back(request)
        while self.pool._findable:
            self.pool._put(self.pool._evict())


@pytest.mark.parametrize("kind", [PublishesNothing, WaitsForNobody, ForgetsWhatIsFree])
def test_the_reference_sees_a_fault_in_sharing_with_no_auditor(monkeypatch, kind):
    for check in ("after_schedule", "after_update"):
        monkeypatch.setattr(Auditor, check, lambda self, message: None)
    scheduler = kind(
        num_blocks=12,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=None,
        max_model_len=100,
        watermark_blocks=0,
        prefix_cache=True,
    )
    loop = Lockstep(scheduler)
    loop.add(*(Request(name, TEXT[:9], 4) for name in "abcdef"))
    with pytest.raises(AssertionError):
        loop.run(60)
