"""The scheduler: who holds blocks and a slot, and which tokens each of them forwards in a step.

There is no prefill phase and no decode phase: a step gives each running request some of the tokens that
num_computed_tokens lacks to num_tokens, and that one rule is chunked prefill, decoding and resumption. With a
drafter, guesses of the tokens to come ride along, on what the step has left once everyone is served.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from millpond.core.block_pool import BlockPool, blocks_for_length, resolve_watermark_blocks
from millpond.core.counters import SchedulerCounters
from millpond.core.disk_prefixes import PrefixDisk
from millpond.core.displacement import choose_victims, tokens_too_many
from millpond.core.door import Door
from millpond.core.notes import Blocked, StepNotes
from millpond.core.planned import planned
from millpond.core.policies import RANK, Fcfs, Policy
from millpond.core.prefix_cache import NOTHING, Link, Prefix, PrefixCache
from millpond.core.request import NEVER, FinishReason, Request, RequestState
from millpond.core.reserve import FixedReserve, Reserve
from millpond.core.results import checked
from millpond.core.sizes import check_sizes, check_whole_prompts
from millpond.core.speculation import Drafter, place_drafts
from millpond.core.step import BlockData, Load, ScheduledRequest, SchedulerOutput, StepResult
from millpond.errors import InvalidRequestError, InvariantError


class RequestUpdate(NamedTuple):
    """What a step gave one request: its new tokens, or the fault that ended it."""

    request: Request
    token_ids: tuple[int, ...]
    fault: str | None = None


class Scheduler:
    """Continuous batching over a block pool: schedule(), run the step, update(); again while has_work.

    max_num_batched_tokens None means no budget of tokens per step. watermark_blocks are held back from newcomers,
    unless a reserve is given that says how many. The running are in the policy's order, which is that of arrival by
    default: every running request is older than every waiting one then, because only the head is admitted and only the
    last running request is preempted. A finished request keeps its blocks and its slot until the next schedule().
    whole_prompts are for what cannot be cut: all of a prompt is in the step that admits it, and gets its one token. So
    nobody runs between two steps, and every step begins with room for any head.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int | None,
        max_model_len: int,
        watermark_blocks: int = 0,
        reserve: Reserve | None = None,
        drafter: Drafter | None = None,
        prefix_cache: bool = False,
        policy: Policy | None = None,
        disk: PrefixDisk | None = None,
        whole_prompts: bool = False,
    ) -> None:
        check_sizes(block_size, max_num_seqs, max_model_len, max_num_batched_tokens)
        if whole_prompts:
            check_whole_prompts(max_model_len, max_num_batched_tokens, drafter is not None, prefix_cache)
        self.disk = disk
        self.cache = PrefixCache(block_size, None if disk is None else disk.withdraw) if prefix_cache else None
        self.pool = BlockPool(num_blocks, self.cache)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.reserve = reserve or FixedReserve(resolve_watermark_blocks(num_blocks, 0.0, watermark_blocks))
        self.drafter = drafter
        self.policy = Fcfs() if policy is None else policy
        self.counters = SchedulerCounters()
        self.notes = StepNotes()
        self.requests: dict[str, Request] = {}
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.free_slots = list(range(max_num_seqs))
        self.door = Door(num_blocks, block_size, max_model_len, whole_prompts)
        self._num_arrivals = 0
        self._in_flight: tuple[tuple[ScheduledRequest, Request], ...] = ()
        self.loads: tuple[Load, ...] = ()

    @property
    def has_work(self) -> bool:
        """Whether anything is unfinished or still to be released."""
        return bool(self.requests)

    @property
    def watermark_blocks(self) -> int:
        """The reserve, as it was chosen last."""
        return self.reserve.blocks

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def step_is_in_flight(self) -> bool:
        """Whether schedule() gave out work whose result has not come back."""
        return any(not request.is_finished for _, request in self._in_flight)

    def add_request(self, request: Request) -> None:
        """Take a request into the queue. Raises InvalidRequestError for a known id or what could never run."""
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        self.door.check(request.num_prompt_tokens, request.max_tokens)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.waiting[request.request_id] = request
        self.policy.enter(request, self.counters.iterations)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False when it is unknown or finished already."""
        request = self.requests.get(request_id)
        if request is None or request.is_finished:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request for a reason that only the engine sees, such as a stop string.

        For use between steps; a stop string that the last allowed token completes wins over LENGTH. Raises
        InvariantError for a request that is unknown or has ended in another way.
        """
        request = self._known(request_id)
        if request.finish_reason is FinishReason.LENGTH and reason is FinishReason.STOP:
            request.finish_reason = reason
        else:
            self._end(request, reason)

    def drop(self, request_id: str, num_tokens: int) -> None:
        """Take a request's newest tokens back: they came in one step with the one that ends it, and lie behind."""
        output = self._known(request_id).output_token_ids
        del output[len(output) - num_tokens :]

    def fail(self, request_ids: Iterable[str], message: str) -> None:
        """End those of the requests that are unfinished with an error: what to do when a step raised.

        When every request of the step in flight has ended, no result for it is awaited any more.
        Raises InvariantError for an unknown id.
        """
        for request in [self._known(request_id) for request_id in request_ids]:
            if not request.is_finished:
                self._end(request, FinishReason.ERROR, message)

    def release_finished(self) -> tuple[str, ...]:
        """Give back the blocks and slots of what has ended, and forget it; schedule() does this first."""
        if not self.finished:
            return ()
        released = tuple(request.request_id for request in self.finished)
        for request in self.finished:
            self._give_back(request)
            del self.requests[request.request_id]
            if self.drafter is not None:
                self.drafter.forget(request.request_id)
            if self.disk is not None:
                self.disk.forget(request)
        self.finished.clear()
        return released

    @property
    def num_decoding(self) -> int:
        """Running requests whose next token is one step away, and not their first."""
        return sum([1 for each in self.running if each.output_token_ids and each.num_missing_tokens == 1])

    def schedule(self, prefill_budget: int | None = None) -> SchedulerOutput:
        """Decide one step: release, grow, admit; then hand out tokens. A policy may have the last preempted for a head.

        prefill_budget bounds the tokens of this step to so many, and at least one, beyond one for each running request.
        Raises InvariantError when the step before it has had neither its result nor its failure.
        """
        if self._in_flight and self.step_is_in_flight:
            raise InvariantError(f"step {self.counters.iterations - 1} is still in flight: it has had no result")
        self.notes.begin()
        self.loads = ()
        released = self.release_finished()
        self.policy.arrange(self.running)
        preempted = self._grow()
        budget = self._budget(prefill_budget)
        admitted, displaced = self._admit(budget)
        if self.waiting and self.notes.blocked is None:
            self.notes.block(self.policy.head(self.waiting), len(self.free_slots), self.max_num_seqs, budget)
        self._in_flight = self._plan_all(budget)
        step = self.counters.iterations
        self.counters.iterations += 1
        scheduled = tuple([each for each, _ in self._in_flight])
        return SchedulerOutput(step, scheduled, admitted, preempted + displaced, released, self.loads)

    def update(self, result: StepResult) -> tuple[RequestUpdate, ...]:
        """Take in a step's result: one record for each request that got tokens or a fault, in schedule order.

        Results of requests that ended while the step ran are dropped. Raises InvariantError, and changes
        nothing, when the result does not answer the step in flight.
        """
        in_flight = self._in_flight
        tokens_of, fault_of = checked(in_flight, result)
        self._in_flight = self.loads = ()
        updates = []
        for each, request in in_flight:
            if request.state is RequestState.FINISHED:
                continue
            token_ids = tokens_of.get(each.request_id, ())
            fault = fault_of.get(each.request_id) if fault_of else None
            if fault is not None:
                self._end(request, FinishReason.ERROR, fault.message)
                request.error_param, request.publish_at = fault.param, NEVER
            else:
                request.num_computed_tokens += len(each.token_ids) - each.num_drafts
            if token_ids:
                updates.append(RequestUpdate(request, self._take_in(request, token_ids)))
            elif fault is not None:
                updates.append(RequestUpdate(request, (), fault.message))
            if request.num_computed_tokens >= request.publish_at:
                self._publish(request)
        return tuple(updates)

    def _take_in(self, request: Request, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Append sampled tokens up to the one that ends the request; returns those that count."""
        taken = token_ids
        for count, token_id in enumerate(token_ids, 1):
            request.output_token_ids.append(token_id)
            if token_id in request.stop_token_ids:
                self._end(request, FinishReason.STOP)
            elif len(request.output_token_ids) >= request.max_tokens:
                self._end(request, FinishReason.LENGTH)
            else:
                continue
            taken = token_ids[:count]
            break
        if self.drafter is not None and request.draft_token_ids:
            num_drafted, request.draft_token_ids = len(request.draft_token_ids), ()
            request.num_computed_tokens += len(taken) - 1
            self.counters.accepted_tokens += len(taken) - 1
            self.drafter.learn(request, num_drafted, len(taken) - 1)
            self._trim(request)
        return taken

    def _publish(self, request: Request) -> None:
        """Make the blocks that it has now computed in full findable, or take the same ones of who was there before."""
        if self.cache is None:
            raise InvariantError(f"request {request.request_id}: has blocks to publish, but there is no prefix cache")
        end = request.num_computed_tokens // self.block_size
        for index in range(request.publish_at // self.block_size - 1, end):
            own, block_id = request.block_ids[index], self.cache.add(request, index)
            if block_id != own:
                self.pool.share((block_id,))
                self.pool.release((own,))
                request.block_ids[index] = block_id
            elif self.disk is not None:
                self.disk.offer(request, index, own)
        request.publish_at = (end + 1) * self.block_size

    def _trim(self, request: Request) -> None:
        """Give back the blocks that only wrong guesses had asked for."""
        keep = blocks_for_length(request.num_computed_tokens, self.block_size)
        self.pool.release(request.block_ids[keep:])
        del request.block_ids[keep:]

    def _known(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise InvariantError(f"request {request_id}: unknown to the scheduler")
        return self.requests[request_id]

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Out of its queue at once, so that the queues hold the unfinished; blocks and slot go at the next release."""
        was_running = request.state is RequestState.RUNNING
        request.move_to(RequestState.FINISHED)
        request.finish_reason = reason
        request.error = error
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self.reserve.note_end(request.num_output_tokens)
        if was_running:
            self._leave_running(request)
        else:
            del self.waiting[request.request_id]
        self.policy.leave(request, was_running)
        self.finished.append(request)

    def _leave_running(self, request: Request) -> None:
        """Found by halving, as the running are in the order of their ranks: half of them may leave in one step."""
        index = bisect_left(self.running, request.rank, key=RANK)
        if self.running[index : index + 1] != [request]:
            raise InvariantError(f"request {request.request_id}: not where its rank {request.rank} puts it")
        del self.running[index]

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids.clear()
        if request.slot is not None:
            heapq.heappush(self.free_slots, request.slot)
            request.slot = None

    def _grow(self) -> tuple[str, ...]:
        preempted: list[str] = []
        grown, size = 0, self.block_size
        while grown < len(self.running):
            request = self.running[grown]
            if request.num_tokens <= len(request.block_ids) * size:  # as in nearly every step
                grown += 1
                continue
            block_ids = self.pool.allocate(self._blocks_needed(request) - len(request.block_ids), request.block_ids[-1])
            if block_ids is None:
                # The last in order: by arrival the youngest. It has not grown yet.
                self.notes.preempt(self.running[-1], request)
                preempted.append(self._preempt(self.running[-1]))
            else:
                request.block_ids += block_ids
                grown += 1
        return tuple(preempted)

    def _preempt(self, victim: Request) -> str:
        generated = victim.num_tokens - victim.num_tokens_at_admission
        self.counters.preemptions += 1
        self.counters.thrashed_admissions += generated < self.block_size
        victim.move_to(RequestState.WAITING)
        self._leave_running(victim)
        self._give_back(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting[victim.request_id] = victim
        self.waiting.move_to_end(victim.request_id, last=False)
        self.policy.put_back(victim)
        return victim.request_id

    def _budget(self, prefill_budget: int | None) -> int | None:
        """A step's tokens. Never fewer than there are running requests, and one more where the bound allows it; where
        prompts are whole nobody decodes beside them."""
        most = self.max_num_batched_tokens
        if prefill_budget is None or self.door.whole_prompts:
            return most
        wanted = len(self.running) + max(1, prefill_budget)
        return wanted if most is None else min(most, wanted)

    def _admit(self, budget: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Admit head after head while a slot is free, the pool has room and the step has tokens left to give.

        Returns who was admitted, and who was preempted for it: the policy may let the head take what it lacks.
        A newcomer to a step whose budget is spent would only lock blocks that the others may need to grow. So
        whoever is admitted gets a token at once, as every running request does in every step, whatever its budget:
        those behind a newcomer keep one each. Where all go in order of arrival nobody is behind one, and only the
        youngest can be in the middle of its tokens.
        For the same reason a block that is being computed can be found one step later: the head waits, once, for those
        before it.
        """
        admitted: list[str] = []
        displaced: list[str] = []
        policy = self.policy
        if not self.waiting or not (self.free_slots or policy.may_preempt):
            return (), ()
        wanted = sum(request.num_missing_tokens for request in self.running)
        computing = self._being_computed(wanted)
        while self.waiting:
            request = policy.head(self.waiting)
            fewest = 0 if self.free_slots else 1
            if budget is not None:
                least = request.num_missing_tokens if self.door.whole_prompts else 1
                fewest = max(fewest, tokens_too_many(request, self.running, wanted, budget, least))
            if fewest and not self._may_displace(request):
                break
            need, found = self._blocks_needed(request), self._find(request)
            victims = self._victims(request, fewest, need, found.block_ids)
            if victims is None:
                break
            if computing.get(found.missing, request.rank) < request.rank:
                self.notes.blocked = Blocked(request.request_id, "prefix", 1, 0, 1)
                break
            fetched = self._fetch(request, found)
            if fetched is None:
                self.notes.blocked = Blocked(request.request_id, "disk", 1, 0, 1)
                break
            for victim in victims:
                wanted -= victim.num_missing_tokens
                self.notes.preempt(victim, request)
                displaced.append(self._preempt(victim))
            self._start(request, need, found.block_ids, fetched)
            admitted.append(request.request_id)
            wanted += request.num_missing_tokens
            if found.missing is not None:
                computing[found.missing] = request.rank
        self.counters.displaced += len(displaced)
        return tuple(admitted), tuple(displaced)

    def _victims(self, head: Request, fewest: int, need: int, found: Sequence[int]) -> list[Request] | None:
        """Who must go for the head: mostly nobody; None where it must wait."""
        pool, taken = self.pool, need - self.pool.num_held(found)
        may_displace = self._may_displace(head)
        # The reserve is for those who run to grow, and who may be preempted at once for the head needs none beside it.
        reserve = 0 if may_displace else self._reserve(head, need, taken)
        if not fewest and taken <= pool.num_free - reserve:
            return []
        victims = None
        if may_displace:
            victims = choose_victims(head, self.running, self.policy, pool, fewest=fewest, need=need, found=found)
        if victims is None and not fewest:
            on = "blocks" if taken > pool.num_free else "reserve"
            self.counters.watermark_delays += on == "reserve"
            self.notes.blocked = Blocked(head.request_id, on, taken, pool.num_free, pool.num_blocks, reserve)
        return victims

    def _may_displace(self, head: Request) -> bool:
        """Whoever has a whole prompt in a step is done with it: nobody is preempted before."""
        return bool(self.running) and not self.door.whole_prompts and self.policy.outranks(head, self.running[-1])

    def _find(self, request: Request) -> Prefix:
        return NOTHING if self.cache is None else self.cache.find(request)

    def _fetch(self, request: Request, found: Prefix) -> tuple[BlockData, ...] | None:
        """What the disk has behind what was found. Where nobody runs, nobody is held up by waiting for it."""
        if self.disk is None:
            return ()
        return self.disk.fetched(request, len(found.block_ids), wait=not self.running)

    def _being_computed(self, wanted: int) -> dict[Link | None, tuple[float, int]]:
        """The blocks in front of those in the middle of their tokens, with the rank of the first to compute each."""
        computing: dict[Link | None, tuple[float, int]] = {}
        if self.cache is not None and wanted > len(self.running):
            for request in self.running:
                missing = self._find(request).missing if request.num_missing_tokens > 1 else None
                if missing is not None:
                    computing.setdefault(missing, request.rank)
        return computing

    def _reserve(self, head: Request, need: int, taken: int) -> int:
        """The watermark may delay a request, it may never exclude one: what it could never let in is let off."""
        reserve = self.reserve.choose(head, need, taken, self.pool.num_free, self.running)
        return reserve if need <= self.pool.num_blocks - reserve else 0

    def _start(self, request: Request, need: int, found: list[int], fetched: Sequence[BlockData]) -> None:
        self.pool.share(found)  # first, so that none of them is evicted for the others
        block_ids = self.pool.allocate(need - len(found), found[-1] if found else None)
        if block_ids is None:
            raise InvariantError(f"request {request.request_id}: {need} blocks wanted, {self.pool.num_free} free")
        request.move_to(RequestState.RUNNING)
        request.block_ids += found + block_ids
        if fetched:
            self.loads += tuple(map(Load, block_ids, fetched))
            self.counters.disk_hit_tokens += len(fetched) * self.block_size
        request.num_computed_tokens = request.num_cached_tokens = (len(found) + len(fetched)) * self.block_size
        if self.cache is not None:
            # What is loaded becomes findable with what is computed, once the step has come back.
            request.publish_at = (len(found) + 1) * self.block_size
            self._count_hit(request)
        request.slot = heapq.heappop(self.free_slots)
        request.num_tokens_at_admission = request.num_tokens
        del self.waiting[request.request_id]
        self.policy.start(request)
        if self.running and request.rank < self.running[-1].rank:
            insort(self.running, request, key=RANK)
        else:
            self.running.append(request)
        self.counters.admissions += 1

    def _count_hit(self, request: Request) -> None:
        if request.num_preemptions:
            self.counters.resumed_hit_tokens += request.num_cached_tokens
        elif request.reads_prefix_cache:
            self.counters.queried_tokens += request.num_tokens
            self.counters.hit_tokens += request.num_cached_tokens
            request.num_hit_tokens = request.num_cached_tokens

    def _plan_all(self, budget: int | None) -> tuple[tuple[ScheduledRequest, Request], ...]:
        """Hand out the budget: a token for each, as there is for all of them (see _admit), the rest in order."""
        shares, sampling, num_tokens = [], [], 0
        left = None if budget is None else budget - len(self.running)
        for request in self.running:
            missing = share = request.num_tokens - request.num_computed_tokens
            if share > 1 and left is not None:
                share = min(share, left + 1)
                left -= share - 1
            shares.append((request, share, share == missing))
            num_tokens += share
            if share == missing:
                sampling.append(request)
        self.counters.forward_tokens += num_tokens
        if self.drafter is not None:
            num_drafts = place_drafts(self.drafter, sampling, left, self.pool, self.block_size)
            self.counters.drafted_tokens += num_drafts
            self.counters.forward_tokens += num_drafts
        return tuple([(planned(*each, self.counters), each[0]) for each in shares])

    def _blocks_needed(self, request: Request) -> int:
        return blocks_for_length(request.num_tokens, self.block_size)
