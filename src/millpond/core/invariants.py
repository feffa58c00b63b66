"""The invariants of the scheduler, numbered as in the design, checked from outside.

audit() looks at one state. Auditor is shown every step as well and keeps its own record of who has which
tokens, so that it sees what no single state shows. Both raise InvariantError "INV-n: ..." with both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from millpond.core.block_pool import BlockPool, blocks_for_length
from millpond.core.policies import RANK
from millpond.core.prefix_cache import Link, PrefixCache
from millpond.core.request import FinishReason, Request, RequestState
from millpond.core.scheduler import Scheduler
from millpond.core.step import ScheduledRequest, SchedulerOutput, StepResult
from millpond.errors import InvariantError


def audit(scheduler: Scheduler) -> None:
    """Check INV-1 to INV-4, and INV-10 of one state, on a scheduler at rest or with a step in flight."""
    _check_membership(scheduler)  # first: what follows takes it that the queues are right
    _check_order(scheduler)
    _check_blocks(scheduler.pool, scheduler.requests.values())
    _check_slots(scheduler)
    _check_waiting_holds_nothing(scheduler)
    _check_running_holds_its_length(scheduler)
    if scheduler.cache is not None:
        _check_findable(scheduler.cache, scheduler.pool)
        loading = {load.block_id for load in scheduler.loads}
        for request in scheduler.running:
            _check_computed_is_findable(scheduler.cache, request, loading)


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
    """Each line of the waiting by the policy's place, the running by their ranks; the lines have all that wait."""
    policy = scheduler.policy
    lines = policy.lines(scheduler.waiting)
    for line in lines:
        for one, other in pairwise(line):
            if policy.place(one) >= policy.place(other):
                raise _broken(4, f"waiting has {_placed(one, policy.place)} before {_placed(other, policy.place)}")
    for one, other in pairwise(scheduler.running):
        if one.rank >= other.rank:
            raise _broken(4, f"running has {_placed(one, RANK)} before {_placed(other, RANK)}")
    in_line = sorted(request.request_id for line in lines for request in line)
    if in_line != sorted(scheduler.waiting):
        raise _broken(4, f"in line are {in_line}, waiting are {sorted(scheduler.waiting)}")


def _placed(request: Request, place: Callable[[Request], tuple[float, int]]) -> str:
    where = place(request)
    return f"{request.request_id} of arrival {request.arrival}" + f" and rank {where}" * (where != (0, request.arrival))


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


def _check_findable(cache: PrefixCache, pool: BlockPool) -> None:
    """Nothing is there twice, and whoever loses a block loses the ones behind it first."""
    blocks: dict[Link, int] = {}
    place = {block_id: place for place, block_id in enumerate(pool.free_block_ids)}
    for block_id in cache:
        link = cache.link_of(block_id)
        if (first := blocks.setdefault(link, block_id)) != block_id:
            raise _broken(10, f"blocks {first} and {block_id} can both be found as {link}")
        parent = link.parent
        if not isinstance(parent, int):
            continue
        if parent not in cache:
            raise _broken(10, f"block {block_id} can be found behind block {parent}, which cannot")
        if pool.ref_count(parent) < pool.ref_count(block_id):
            raise _broken(
                10,
                f"block {block_id} has {pool.ref_count(block_id)} holders, "
                f"block {parent} before it only {pool.ref_count(parent)}",
            )
        if parent in place and place[parent] < place[block_id]:
            raise _broken(10, f"block {parent} would be evicted before block {block_id} behind it")


def _check_computed_is_findable(cache: PrefixCache, request: Request, loading: Container[int]) -> None:
    """Of a running request what it has computed in full can be found, and nothing else; nor can what is loading yet."""
    num_full = request.num_computed_tokens // cache.block_size
    tokens = request.token_ids_between(0, request.num_tokens)
    links = _links_of(request, tokens, num_full, cache.block_size)
    for index, block_id in enumerate(request.block_ids):
        has = cache.link_of(block_id) if block_id in cache else None
        wants = links.get(block_id) if index < num_full and block_id not in loading else None
        if has != wants:
            name = f"block {block_id}, number {index} of request {request.request_id}"
            raise _broken(10, f"{name}, can be found as {has}, not {wants}")


def _links_of(request: Request, tokens: Sequence[int], num_full: int, size: int) -> dict[int, Link]:
    """What a request's first blocks can be found as, by block."""
    held = request.block_ids[:num_full]
    parents = [request.sampling.cache_salt, *held]
    return {
        block_id: Link(parents[index], tuple(tokens[index * size : (index + 1) * size]))
        for index, block_id in enumerate(held)
    }


@dataclass(slots=True)
class _Record:
    """What the auditor itself knows of a request: the tokens it was given and the positions it has forwarded."""

    request: Request
    output_token_ids: list[int]
    num_computed_tokens: int = 0


@dataclass(slots=True)
class Auditor:
    """Checks INV-1 to INV-7 and INV-9 to INV-11 while a scheduler runs: show it every step.

    after_schedule(output) right after schedule(), after_update(result) right after update(); for a step that
    failed, after_update of an empty result once its requests are failed. It may join at any moment between steps.
    """

    scheduler: Scheduler
    _records: dict[str, _Record] = field(default_factory=dict)
    _in_flight: tuple[ScheduledRequest, ...] = ()
    _links: dict[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, request in self.scheduler.requests.items():
            self._records[name] = _Record(request, list(request.output_token_ids), request.num_computed_tokens)
        self._links = _all_links(self.scheduler)

    def after_schedule(self, output: SchedulerOutput) -> None:
        """Check a step that was just decided. Raises InvariantError."""
        audit(self.scheduler)
        self._check_new_links({})
        self._forget_released()
        for name, request in self.scheduler.requests.items():
            if name not in self._records:
                self._records[name] = _Record(request, [])
        for name in output.preempted:
            self._records[name].num_computed_tokens = 0
        for record in self._records.values():
            _check_tokens(record)
        for name in output.admitted if self.scheduler.cache is not None else ():
            self._records[name].num_computed_tokens = _num_found(self._records[name].request, self.scheduler.block_size)
        for each in output.scheduled:
            _check_share(self._records[each.request_id], each, each.request_id in output.admitted)
            self._check_writes(each)
            if self.scheduler.door.whole_prompts:
                _check_whole(each)
        self._check_loads(output)
        self._check_progress(output)
        self._in_flight = output.scheduled

    def after_update(self, result: StepResult) -> None:
        """Check what a step's result did. Raises InvariantError."""
        tokens = {each.request_id: each.token_ids for each in result.sampled}
        links: dict[int, Link] = {}
        for each in self._in_flight:
            record = self._records[each.request_id]
            given = tokens.get(each.request_id, ())
            reason = record.request.finish_reason
            # One that ends with an error and has tokens ended later, over its text.
            if reason is FinishReason.ABORT or (reason is FinishReason.ERROR and not given):
                continue
            # A guess counts as computed once it was sampled; what lies behind an end was never given.
            record.num_computed_tokens += len(each.token_ids) - each.num_drafts + max(0, len(given) - 1)
            sequence = (*record.request.prompt_token_ids, *record.output_token_ids, *given)
            num_full = record.num_computed_tokens // self.scheduler.block_size
            links |= _links_of(record.request, sequence, num_full, self.scheduler.block_size)
            record.output_token_ids += given[: _num_kept(record.request, len(record.output_token_ids), len(given))]
            _check_tokens(record)
        self._in_flight = ()
        audit(self.scheduler)
        self._check_new_links(links)

    def _check_new_links(self, computed: dict[int, Link]) -> None:
        """What can be found from now on is what the last step has computed, if it went well."""
        links = _all_links(self.scheduler)
        for block_id, link in links.items():
            if self._links.get(block_id) != link and computed.get(block_id) != link:
                raise _broken(10, f"block {block_id} can be found as {link}, but was not computed as that")
        self._links = links

    def _check_writes(self, each: ScheduledRequest) -> None:
        size, cache = self.scheduler.block_size, self.scheduler.cache
        end = each.first_position + len(each.token_ids)
        for block_id in each.block_ids[each.first_position // size : blocks_for_length(end, size)]:
            name, held = f"request {each.request_id} writes block {block_id}", self.scheduler.pool.ref_count(block_id)
            if held != 1:
                raise _broken(9, f"{name}, which has {held} holders, not 1")
            if cache is not None and block_id in cache:
                raise _broken(9, f"{name}, which can be found as {cache.link_of(block_id)}")

    def _check_loads(self, output: SchedulerOutput) -> None:
        """What is loaded lies in front of where a request begins that was just admitted, and is nobody else's."""
        size, pool, loads = self.scheduler.block_size, self.scheduler.pool, Counter(each[0] for each in output.loads)
        for each in output.scheduled if loads else ():
            if each.admission is not None:
                loads.subtract(each.block_ids[: each.first_position // size])
        for block_id, left in loads.items():
            name, held = f"block {block_id} is loaded in step {output.step}", pool.ref_count(block_id)
            if left > 0:
                raise _broken(9, f"{name}, but is in front of nobody who begins in it")
            if left == 0 and held != 1:
                raise _broken(9, f"{name}, but has {held} holders, not 1")

    def _forget_released(self) -> None:
        for name in [known for known in self._records if known not in self.scheduler.requests]:
            request = self._records.pop(name).request
            if not request.is_finished:
                raise _broken(7, f"request {name} was dropped while {request.state.value}, not finished")

    def _check_progress(self, output: SchedulerOutput) -> None:
        """Each step moves the first in the policy's order on, so that it ends, and then the next one is the first."""
        unfinished = [record.request for record in self._records.values() if not record.request.is_finished]
        if unfinished and not output.scheduled and not output.released:
            raise _broken(5, f"step {output.step} has {len(unfinished)} unfinished and 0 tokens or releases")
        scheduled = [each.request_id for each in output.scheduled if each.token_ids]
        running = [request.request_id for request in self.scheduler.running]
        if scheduled != running:
            raise _broken(5, f"step {output.step} has tokens for {scheduled}, but {running} are running")
        first = self.scheduler.policy.first(unfinished)
        if first is None:
            return
        if first.request_id in output.preempted:
            raise _broken(7, f"the first request {first.request_id} was preempted in step {output.step}")
        if first.request_id not in scheduled and not self._waits_for_disk(first):
            raise _broken(7, f"the first request {first.request_id} stands still, step {output.step} runs {scheduled}")

    def _waits_for_disk(self, request: Request) -> bool:
        blocked = self.scheduler.notes.blocked
        return blocked is not None and blocked.on == "disk" and blocked.request_id == request.request_id


def _all_links(scheduler: Scheduler) -> dict[int, Link]:
    cache = scheduler.cache
    return {} if cache is None else {block_id: cache.link_of(block_id) for block_id in cache}


def _num_found(request: Request, block_size: int) -> int:
    """Where a request begins that was just admitted: behind full blocks, whose links are checked by the state."""
    start = request.num_computed_tokens
    most = request.num_tokens - 1 if request.reads_prefix_cache else 0
    if start % block_size or start > most:
        raise _broken(6, f"request {request.request_id} has found {start} tokens in blocks of {block_size}, of {most}")
    return start


def _check_share(record: _Record, each: ScheduledRequest, is_admitted: bool) -> None:
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
    if told != (tokens if is_admitted else None):
        raise _broken(6, f"request {name} starts at {start} of {tokens}, but the runner is told {told}")


def _check_whole(each: ScheduledRequest) -> None:
    if each.first_position or not each.samples:
        begun = f"{len(each.token_ids)} tokens from position {each.first_position} on"
        raise _broken(11, f"request {each.request_id} has {begun}, which is not the whole prompt")


def _num_kept(request: Request, num_before: int, num_given: int) -> int:
    """How many of a step's tokens a request keeps: all of them, unless one of them ended it; that one it keeps too."""
    return max(1, request.num_output_tokens - num_before) if request.is_finished else num_given


def _check_tokens(record: _Record) -> None:
    has, given = record.request.output_token_ids, record.output_token_ids
    if has != given:
        raise _broken(6, f"request {record.request.request_id} has output {has}, but was given {given}")
