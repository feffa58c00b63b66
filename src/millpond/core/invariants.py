"""The invariants of the scheduler, numbered as in the design, checked from outside.

audit() looks at one state. Auditor is shown every step as well and keeps its own record of who has which
tokens, so that it sees what no single state shows. Both raise InvariantError "INV-n: ..." with both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from millpond.core.block_pool import BlockPool, blocks_for_length
from millpond.core.request import FinishReason, Request, RequestState
from millpond.core.scheduler import Scheduler
from millpond.core.step import ScheduledRequest, SchedulerOutput, StepResult
from millpond.errors import InvariantError


def audit(scheduler: Scheduler) -> None:
    """Check INV-1 to INV-4 on a scheduler at rest or with a step in flight."""
    _check_membership(scheduler)  # first: what follows takes it that the queues are right
    _check_order(scheduler)
    _check_blocks(scheduler.pool, scheduler.requests.values())
    _check_slots(scheduler)
    _check_waiting_holds_nothing(scheduler)
    _check_running_holds_its_length(scheduler)


def check_same_decisions(first: Sequence[SchedulerOutput], second: Sequence[SchedulerOutput]) -> None:
    """INV-8: two runs over the same requests in the same order decided the same."""
    for one, other in zip(first, second, strict=False):
        if one != other:
            raise _broken(8, f"step {one.step} decided {one} in one run and {other} in the other")
    if len(first) != len(second):
        raise _broken(8, f"one run took {len(first)} steps and the other {len(second)}")


def _broken(number: int, message: str) -> InvariantError:
    return InvariantError(f"INV-{number}: {message}")


def _check_blocks(pool: BlockPool, requests: Iterable[Request]) -> None:
    holders = Counter(block_id for request in requests for block_id in request.block_ids)
    free = Counter(pool.free_block_ids)
    for block_id in holders | free:
        if not 0 <= block_id < pool.num_blocks:
            raise _broken(1, f"block {block_id} is free or held, but the pool has {pool.num_blocks}")
    for block_id in range(pool.num_blocks):
        held, counted, times_free = holders[block_id], pool.ref_count(block_id), free[block_id]
        if held != counted:
            raise _broken(1, f"block {block_id} has {held} holders and a reference count of {counted}")
        if times_free != (0 if held else 1):
            raise _broken(1, f"block {block_id} has {held} holders and is free {times_free} times")
    if pool.num_free + len(holders) != pool.num_blocks:
        raise _broken(1, f"{pool.num_free} free + {len(holders)} held is not {pool.num_blocks} blocks")


def _check_slots(scheduler: Scheduler) -> None:
    for request in scheduler.running:
        if request.slot is None:
            raise _broken(2, f"running request {request.request_id} has no slot")
    held = [request.slot for request in scheduler.requests.values() if request.slot is not None]
    slots = sorted(scheduler.free_slots + held)
    if slots != list(range(scheduler.max_num_seqs)):
        raise _broken(
            2, f"free slots {scheduler.free_slots} and held slots {held} are not all {scheduler.max_num_seqs} once"
        )


def _check_waiting_holds_nothing(scheduler: Scheduler) -> None:
    for request in scheduler.waiting.values():
        name = f"waiting request {request.request_id}"
        if request.block_ids:
            raise _broken(2, f"{name} holds {len(request.block_ids)} blocks, not 0")
        if request.slot is not None:
            raise _broken(2, f"{name} holds slot {request.slot}, not none")
        if request.num_computed_tokens:
            raise _broken(2, f"{name} has {request.num_computed_tokens} computed tokens in 0 blocks")


def _check_running_holds_its_length(scheduler: Scheduler) -> None:
    """Exactly its length once scheduled; between steps the newest token may still lack its block."""
    for request in scheduler.running:
        held, length = len(request.block_ids), request.num_tokens
        need = blocks_for_length(length + len(request.draft_token_ids), scheduler.block_size)
        before = blocks_for_length(length - 1, scheduler.block_size)
        if held != need and (scheduler.step_is_in_flight or held != before):
            raise _broken(3, f"running request {request.request_id} of {length} tokens holds {held} blocks, not {need}")
        if request.num_computed_tokens >= length:
            raise _broken(
                3, f"running request {request.request_id} has {request.num_computed_tokens} of {length} tokens computed"
            )


def _check_order(scheduler: Scheduler) -> None:
    for name, queue in (("waiting", list(scheduler.waiting.values())), ("running", scheduler.running)):
        for one, other in pairwise(queue):
            if one.arrival >= other.arrival:
                raise _broken(
                    4,
                    f"{name} has {one.request_id} of arrival {one.arrival} "
                    f"before {other.request_id} of arrival {other.arrival}",
                )


def _check_membership(scheduler: Scheduler) -> None:
    waiting = [(request, RequestState.WAITING) for request in scheduler.waiting.values()]
    queued = waiting + [(request, RequestState.RUNNING) for request in scheduler.running]
    for request, state in queued:
        if request.state is not state:
            raise _broken(4, f"request {request.request_id} is queued as {state.value} and is {request.state.value}")
    queued_ids = sorted(request.request_id for request, _ in queued)
    unfinished_ids = sorted(name for name, request in scheduler.requests.items() if not request.is_finished)
    if queued_ids != unfinished_ids:
        raise _broken(4, f"queued are {queued_ids}, unfinished are {unfinished_ids}")


@dataclass(slots=True)
class _Record:
    """What the auditor itself knows of a request: the tokens it was given and the positions it has forwarded."""

    request: Request
    output_token_ids: list[int]
    num_computed_tokens: int = 0


@dataclass(slots=True)
class Auditor:
    """Checks INV-1 to INV-7 while a scheduler runs: show it every step.

    after_schedule(output) right after schedule(), after_update(result) right after update(); for a step that
    failed, after_update of an empty result once its requests are failed. It may join at any moment between steps.
    """

    scheduler: Scheduler
    _records: dict[str, _Record] = field(default_factory=dict)
    _in_flight: tuple[ScheduledRequest, ...] = ()

    def __post_init__(self) -> None:
        for name, request in self.scheduler.requests.items():
            self._records[name] = _Record(request, list(request.output_token_ids), request.num_computed_tokens)

    def after_schedule(self, output: SchedulerOutput) -> None:
        """Check a step that was just decided. Raises InvariantError."""
        audit(self.scheduler)
        self._forget_released()
        for name, request in self.scheduler.requests.items():
            if name not in self._records:
                self._records[name] = _Record(request, [])
        for name in output.preempted:
            self._records[name].num_computed_tokens = 0
        for record in self._records.values():
            _check_tokens(record)
        for each in output.scheduled:
            _check_share(self._records[each.request_id], each)
        self._check_progress(output)
        self._in_flight = output.scheduled

    def after_update(self, result: StepResult) -> None:
        """Check what a step's result did. Raises InvariantError."""
        tokens = {each.request_id: each.token_ids for each in result.sampled}
        for each in self._in_flight:
            record = self._records[each.request_id]
            if record.request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                continue
            given = tokens.get(each.request_id, ())
            # A guess counts as computed once it was sampled; what lies behind an end was never given.
            record.num_computed_tokens += len(each.token_ids) - each.num_drafts + max(0, len(given) - 1)
            record.output_token_ids += given[: _num_kept(record.request, len(record.output_token_ids), len(given))]
            _check_tokens(record)
        self._in_flight = ()
        audit(self.scheduler)

    def _forget_released(self) -> None:
        for name in [known for known in self._records if known not in self.scheduler.requests]:
            request = self._records.pop(name).request
            if not request.is_finished:
                raise _broken(7, f"request {name} was dropped while {request.state.value}, not finished")

    def _check_progress(self, output: SchedulerOutput) -> None:
        """Each step moves the oldest unfinished request on, so that it ends, and then the next one is the oldest."""
        unfinished = [record.request for record in self._records.values() if not record.request.is_finished]
        if unfinished and not output.scheduled and not output.released:
            raise _broken(5, f"step {output.step} has {len(unfinished)} unfinished and 0 tokens or releases")
        scheduled = [each.request_id for each in output.scheduled if each.token_ids]
        running = [request.request_id for request in self.scheduler.running]
        if scheduled != running:
            raise _broken(5, f"step {output.step} has tokens for {scheduled}, but {running} are running")
        oldest = min(unfinished, key=lambda request: request.arrival, default=None)
        if oldest is None:
            return
        if oldest.request_id in output.preempted:
            raise _broken(7, f"the oldest request {oldest.request_id} was preempted in step {output.step}")
        if oldest.request_id not in scheduled:
            raise _broken(
                7, f"the oldest request {oldest.request_id} stands still, step {output.step} runs {scheduled}"
            )


def _check_share(record: _Record, each: ScheduledRequest) -> None:
    """A request goes on exactly where it was, with exactly the tokens it has, and the runner is told of them."""
    name, start = each.request_id, each.first_position
    if start != record.num_computed_tokens:
        raise _broken(6, f"request {name} goes on at position {start}, not {record.num_computed_tokens}")
    tokens = (*record.request.prompt_token_ids, *record.output_token_ids)
    end = start + len(each.token_ids) - each.num_drafts
    own = each.token_ids[: end - start]
    if own != tokens[start:end]:
        raise _broken(6, f"request {name} runs {own} at position {start}, not {tokens[start:end]}")
    if each.samples != (end == len(tokens)):
        raise _broken(6, f"request {name} has samples {each.samples} at position {end} of {len(tokens)}")
    most = record.request.max_tokens - len(record.output_token_ids) - 1 if each.samples else 0
    if each.num_drafts > most:
        raise _broken(6, f"request {name} has {each.num_drafts} drafts, but room for {most}")
    told = None if each.admission is None else each.admission.prompt_token_ids + each.admission.output_token_ids
    if told != (tokens if start == 0 else None):
        raise _broken(6, f"request {name} starts at {start} of {tokens}, but the runner is told {told}")


def _num_kept(request: Request, num_before: int, num_given: int) -> int:
    """How many of a step's tokens a request keeps: all of them, unless one of them ended it; that one it keeps too."""
    return max(1, request.num_output_tokens - num_before) if request.is_finished else num_given


def _check_tokens(record: _Record) -> None:
    has, given = record.request.output_token_ids, record.output_token_ids
    if has != given:
        raise _broken(6, f"request {record.request.request_id} has output {has}, but was given {given}")
