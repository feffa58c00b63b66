"""One scheduler in one state, and what may happen to it next: the pieces that lab/explorer.py puts together.

The runner and the drafter are part of the state: what they say is an action like any other. A world is copied for
every action, so a copy is made by hand, object by object; copy.deepcopy takes twenty times as long.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from millpond.core.block_pool import BlockPool
from millpond.core.invariants import Auditor, audit, check_same_decisions
from millpond.core.prefix_cache import PrefixCache
from millpond.core.request import Request
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import StepLoad
from millpond.core.step import RequestFault, SampledTokens, ScheduledRequest, SchedulerOutput, StepResult
from millpond.errors import InvariantError
from millpond.lab.chosen_disk import ChosenDisk
from millpond.lab.policy_states import CHOICES, copy_policy, numbers_of, small_policy

STOP_TOKEN = 0
NO_SLOT_OWNER = ""
COMMON = -2  # in the place of an arrival: whose tokens the twins have


@dataclass(frozen=True, slots=True)
class Case:
    """One scheduler to explore: its sizes, and what is offered to it.

    budget None is no budget of tokens per step. At most most_unfinished requests are unfinished at any time, each
    with a prompt of at most longest_prompt tokens where that is given. A step tries up to most_drafts guesses for each.
    With the prefix cache, some of the requests are twins: at the same position they have the same token, or one of two.
    Where the policy is not fcfs each request has one of two priorities, or is one of two tenants'.
    With any_reserve the reserve is nothing or all that the law allows, as is chosen before each admission. With a disk
    each head that asks finds any number of its blocks there, or has to wait for the answer. With whole_prompts every
    prompt that fits a step may come, and gets one token.
    """

    num_blocks: int
    block_size: int
    slots: int
    reserve: int
    budget: int | None
    most_unfinished: int
    most_drafts: int = 0
    longest_prompt: int | None = None
    prefix_cache: bool = False
    policy: str = "fcfs"
    any_reserve: bool = False
    disk: bool = False
    whole_prompts: bool = False

    @property
    def most_tokens(self) -> int:
        """Of a prompt."""
        positions = self.num_blocks * self.block_size
        fits = positions if self.budget is None or not self.whole_prompts else min(positions, self.budget)
        return min(fits, self.longest_prompt or fits)

    def make_scheduler(self, kind: type[Scheduler]) -> Scheduler:
        return kind(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.slots,
            max_num_batched_tokens=self.budget,
            max_model_len=self.most_tokens if self.whole_prompts else self.num_blocks * self.block_size + 1,
            whole_prompts=self.whole_prompts,
            watermark_blocks=self.reserve,
            reserve=ChosenReserve(self.num_blocks) if self.any_reserve else None,
            drafter=ChosenDrafts() if self.most_drafts else None,
            prefix_cache=self.prefix_cache,
            policy=small_policy(self.policy),
            disk=ChosenDisk(self.block_size) if self.disk else None,
        )

    def __str__(self) -> str:
        parts = [f"{counted(self.num_blocks, 'block')} of {self.block_size}", counted(self.slots, "slot")]
        parts.append("any reserve" if self.any_reserve else f"reserve {self.reserve}")
        if self.budget is not None:
            parts.append(f"{counted(self.budget, 'token')} a step")
        parts.append(counted(self.most_unfinished, "request"))
        if self.most_drafts:
            parts.append(counted(self.most_drafts, "guess"))
        if self.prefix_cache:
            parts.append("prefix cache and disk" if self.disk else "prefix cache")
        if self.policy != "fcfs":
            parts.append(self.policy)
        if self.whole_prompts:
            parts.append("whole prompts")
        return ", ".join(parts)


class Action(NamedTuple):
    """What happens next: add, abort, schedule (guesses by request), update, or fail.

    Who is added has numbers: prompt tokens, 1 for a twin, its priority or tenant; zeros at the end are left out.

    Where the reserve is chosen, too, a schedule's first number is how many it lets in before it holds all back. With a
    disk, its answers come before the guesses, one for each that may be let in.

    An update has one (accepted guesses, ending) for each scheduled request; ending is one of ENDINGS.
    """

    verb: str
    request_id: str = ""
    numbers: tuple[int, ...] = ()
    outcomes: tuple[tuple[int, str], ...] = ()


GOES_ON, STOPS, FAULTS = ENDINGS = ("goes on", "stops", "faults")


class ChosenDrafts:
    """A Drafter whose guesses are as many as it is told, request by request in the order of the step."""

    def __init__(self) -> None:
        self.counts: Iterator[int] = iter(())

    def draft(self, request: Request, most: int, load: StepLoad) -> tuple[int, ...]:
        count = min(next(self.counts, 0), most)
        return tuple(right_token(family_of(request), request.num_tokens + index) for index in range(count))

    def learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Nothing: how many to try next is an action."""

    def forget(self, request_id: str) -> None:
        """Nothing is known of it."""


class ChosenReserve:
    """A Reserve that lets in as many as it is told, and then holds back all that an empty pool has beside the head.

    Whether the head is let in is all that a reserve decides, so these two stand for every number that there is.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = self.let_in = 0

    def choose(self, head: Request, need: int, taken: int, num_free: int, running: Sequence[Request]) -> int:
        self.blocks = 0 if self.let_in > 0 else self.num_blocks - need
        self.let_in -= 1
        return self.blocks

    def note_end(self, num_output_tokens: int) -> None:
        """Nothing: what it chooses is an action."""


def family_of(request: Request) -> int:
    """Whose tokens a request has: its own, or the twins'."""
    return COMMON if request.prompt_token_ids[0] == _other_token(COMMON, 0) else request.arrival


def right_token(family: int, position: int) -> int:
    """What stands at a position of a request, and nowhere else; what is guessed there is right."""
    return 1_000 * (family + 1) + 2 * position


def _other_token(family: int, position: int) -> int:
    """The same, for where the guess is to be wrong."""
    return right_token(family, position) + 1


def counted(number: int, noun: str) -> str:
    """A number and what it counts: 1 block, 2 blocks, 3 guesses."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def name_of(arrival: int) -> str:
    """a to z, then a1 to z1, ..."""
    return chr(ord("a") + arrival % 26) + (str(arrival // 26) if arrival >= 26 else "")


@dataclass(slots=True)
class World:
    """A scheduler, its auditor, the K/V that its steps have written, and the step in flight.

    cells holds a token for each position of each block, slot_owners whom the runner believes in each slot.
    """

    case: Case
    scheduler: Scheduler
    auditor: Auditor
    cells: list[int]
    slot_owners: list[str]
    in_flight: SchedulerOutput | None = None

    @classmethod
    def empty(cls, case: Case, kind: type[Scheduler] = Scheduler) -> World:
        scheduler = case.make_scheduler(kind)
        cells = [STOP_TOKEN] * (case.num_blocks * case.block_size)
        return cls(case, scheduler, Auditor(scheduler), cells, [NO_SLOT_OWNER] * case.slots)

    def copy(self) -> World:
        """The same state in objects of its own; what cannot change is shared."""
        requests = {id(request): _copy_record(request) for request in self.scheduler.requests.values()}
        scheduler = _copy_scheduler(self.scheduler, requests)
        auditor = Auditor.__new__(Auditor)
        auditor.scheduler, auditor._in_flight = scheduler, self.auditor._in_flight
        auditor._records, auditor._links = {}, self.auditor._links  # replaced whole, never changed
        for name, record in self.auditor._records.items():
            auditor._records[name] = twin = _copy_record(record)
            # One that was released is nobody's any more, and does not change.
            twin.request = requests.get(id(record.request), record.request)
        return World(self.case, scheduler, auditor, self.cells.copy(), self.slot_owners.copy(), self.in_flight)

    def actions(self) -> Iterator[Action]:
        """Everything that may happen next, steps first."""
        alive = [name for name, request in self.scheduler.requests.items() if not request.is_finished]
        if self.in_flight is not None:
            yield from self._updates(self.in_flight)
        elif self.scheduler.has_work:
            counts = range(self.case.most_drafts + 1)
            drafts = product(counts, repeat=min(len(alive), self.case.slots) if len(counts) > 1 else 0)
            let_in = [()] if not self.case.any_reserve else [(n,) for n in range(self._most_let_in() + 1)]
            answers = product(range(self._most_on_disk() + 2), repeat=self._num_answers())
            yield from (Action("schedule", numbers=sum(each, ())) for each in product(let_in, answers, drafts))
        yield from (Action("abort", name) for name in alive)
        if len(alive) < self.case.most_unfinished:
            name = name_of(self.scheduler._num_arrivals)
            kinds = product((0, 1) if self.case.prefix_cache else (0,), self._choices())
            for is_twin, choice in kinds:
                rest = (is_twin, choice) if choice else (is_twin,) * is_twin
                yield from (Action("add", name, (length, *rest)) for length in range(1, self.case.most_tokens + 1))

    def _choices(self) -> tuple[int, ...]:
        return (0,) if self.case.policy == "fcfs" else CHOICES

    def _most_let_in(self) -> int:
        """Preempted ones may be let in as well, in the same step."""
        return min(self.case.slots, self.scheduler.num_waiting + self.scheduler.num_running)

    def _most_on_disk(self) -> int:
        return (self.case.num_blocks * self.case.block_size - 1) // self.case.block_size

    def _num_answers(self) -> int:
        """Whoever may be let in may ask the disk."""
        return self._most_let_in() if self.case.disk else 0

    def _updates(self, output: SchedulerOutput) -> Iterator[Action]:
        """Each request goes on or stops, with each number of right guesses; one of them faults; the step fails."""
        requests = self.scheduler.requests
        choices: list[list[tuple[int, str]]] = []
        for each in output.scheduled:
            if not each.samples or requests[each.request_id].is_finished:
                choices.append([(0, GOES_ON)])
            else:
                choices.append([(n, ending) for ending in (GOES_ON, STOPS) for n in range(each.num_drafts + 1)])
        for outcomes in product(*choices):
            yield Action("update", outcomes=outcomes)
        if output.scheduled:
            fine = [(0, GOES_ON)] * len(output.scheduled)
            for index, each in enumerate(output.scheduled):
                if not requests[each.request_id].is_finished:
                    faulty = (*fine[:index], (0, FAULTS), *fine[index + 1 :])
                    yield Action("update", each.request_id, outcomes=faulty)
            yield Action("fail")

    def do(self, action: Action) -> None:
        """Carry out an action and check every invariant. Raises InvariantError; the world is of no use then."""
        if action.verb == "add":
            self._add(action.request_id, *action.numbers)
            audit(self.scheduler)
        elif action.verb == "abort":
            self.scheduler.abort(action.request_id)
            audit(self.scheduler)
        elif action.verb == "schedule":
            self._schedule(action.numbers)
        else:
            self._update(action)

    def _add(self, name: str, num_prompt_tokens: int, is_twin: int = 0, choice: int = 0) -> None:
        """As many tokens as fit may be generated: since every step may be the last, that covers all smaller limits."""
        family = COMMON if is_twin else self.scheduler._num_arrivals
        prompt = tuple(_other_token(family, position) for position in range(num_prompt_tokens))
        max_tokens = 1 if self.case.whole_prompts else self.scheduler.door.max_tokens_that_fit(num_prompt_tokens)
        request = Request(name, prompt, max_tokens, stop_token_ids=frozenset({STOP_TOKEN}))
        request.priority, request.tenant = choice, str(choice)
        self.scheduler.add_request(request)

    def _schedule(self, numbers: tuple[int, ...]) -> None:
        twin = self.copy()
        output, again = self._decide(numbers), twin._decide(numbers)
        check_same_decisions([output], [again])
        self.auditor.after_schedule(output)
        self._forward(output)
        self.in_flight = output

    def _decide(self, numbers: tuple[int, ...]) -> SchedulerOutput:
        counts = iter(numbers)
        if isinstance(self.scheduler.reserve, ChosenReserve):
            self.scheduler.reserve.let_in = next(counts, 0)
        if isinstance(self.scheduler.disk, ChosenDisk):
            self.scheduler.disk.answers = iter(tuple(islice(counts, self._num_answers())))
        if isinstance(self.scheduler.drafter, ChosenDrafts):
            self.scheduler.drafter.counts = counts
        return self.scheduler.schedule()

    def _forward(self, output: SchedulerOutput) -> None:
        """Write K/V as a runner would, and read it back: each request must find its own tokens and no others."""
        size = self.case.block_size
        for load in output.loads:
            self.cells[load.block_id * size : load.block_id * size + size] = array("q", bytes(load.data))
        for each in output.scheduled:
            if each.admission is not None:
                self.slot_owners[each.slot] = each.request_id
            if self.slot_owners[each.slot] != each.request_id:
                raise InvariantError(
                    f"INV-6: request {each.request_id} runs in slot {each.slot}, "
                    f"where the runner has {self.slot_owners[each.slot] or 'nobody'}"
                )
            for position, token_id in enumerate(each.token_ids, each.first_position):
                self.cells[each.block_ids[position // size] * size + position % size] = token_id
        for each in output.scheduled:
            self._read_back(each)

    def _read_back(self, each: ScheduledRequest) -> None:
        size = self.case.block_size
        own = self.scheduler.requests[each.request_id].token_ids_between(0, each.first_position) + each.token_ids
        cells = [cell for block in each.block_ids for cell in self.cells[block * size : block * size + size]]
        read = tuple(cells[: len(own)])
        if read != own:
            raise InvariantError(f"INV-6: request {each.request_id} reads the K/V of {read}, but has {own}")

    def _update(self, action: Action) -> None:
        output, self.in_flight = self.in_flight, None
        if output is None:
            raise InvariantError("no step is in flight")
        if action.verb == "fail":
            self.scheduler.fail([each.request_id for each in output.scheduled], "the forward pass failed")
            self.auditor.after_update(StepResult(()))
            return
        sampled, faults = [], []
        for each, (num_accepted, ending) in zip(output.scheduled, action.outcomes, strict=True):
            if ending == FAULTS:
                faults.append(RequestFault(each.request_id, "the logits are not finite"))
            elif each.samples:
                sampled.append(SampledTokens(each.request_id, self._tokens(each, num_accepted, ending)))
        result = StepResult(tuple(sampled), tuple(faults))
        self.scheduler.update(result)
        self.auditor.after_update(result)

    def _tokens(self, each: ScheduledRequest, num_accepted: int, ending: str) -> tuple[int, ...]:
        """The guesses that were right and the token behind them; it differs from a guess that was wrong."""
        first = len(each.token_ids) - each.num_drafts
        family = family_of(self.scheduler.requests[each.request_id])
        last = STOP_TOKEN if ending == STOPS else _other_token(family, each.first_position + first + num_accepted)
        return (*each.token_ids[first : first + num_accepted], last)

    def key(self) -> bytes:
        """What the scheduler's next decisions depend on, equal for states that differ in names alone.

        Left out are the numbers of blocks and slots, who ended (but not what they hold until the next step), and how
        many of a request's tokens came with its prompt (but not whether any was generated, which a victim might lose).
        """
        scheduler = self.scheduler
        shares = {} if self.in_flight is None else {each.request_id: each for each in self.in_flight.scheduled}
        ended = scheduler.finished
        numbers = [
            self.in_flight is not None,
            len(scheduler.running),
            bool(ended),
            sum([len(request.block_ids) for request in ended]),
            sum([request.slot is not None for request in ended]),
        ]
        for request in scheduler.running:
            numbers += request.num_tokens, request.num_computed_tokens, len(request.block_ids)
            share = shares.get(request.request_id)
            numbers += bool(request.output_token_ids), len(share.token_ids) if share else 0
            numbers.append(share.num_drafts if share else 0)
        for request in self._in_line():
            numbers += request.num_tokens, bool(request.output_token_ids)
        numbers += numbers_of(scheduler)
        return bytes(numbers) if scheduler.cache is None else bytes((*numbers, *self._sharing(scheduler.cache)))

    def _in_line(self) -> list[Request]:
        """All that wait, line by line."""
        return [request for line in self.scheduler.policy.lines(self.scheduler.waiting) for request in line]

    def _sharing(self, cache: PrefixCache) -> Iterator[int]:
        """The rest of the key with a prefix cache: who has which token and which block, and what can be found.

        Tokens and blocks count by the order in which they come up, as only whether two are the same can matter: tokens
        at each position, after the two that the twins have there.
        """
        scheduler = self.scheduler
        tokens: dict[int, int] = {}
        blocks: dict[int, int] = {}
        counts: dict[int, int] = {}

        def names(token_ids: tuple[int, ...], first: int) -> Iterator[int]:
            for position, token_id in enumerate(token_ids, first):
                known = [right_token(COMMON, position), _other_token(COMMON, position)]
                if token_id in known:
                    yield known.index(token_id)
                else:
                    if token_id not in tokens:
                        counts[position] = counts.get(position, 1) + 1
                    yield tokens.setdefault(token_id, counts[position])

        for request in (*scheduler.running, *self._in_line()):
            yield family_of(request) == COMMON
            yield from names(request.token_ids_between(0, request.num_tokens), 0)
        for request in (*scheduler.running, *(each for each in scheduler.finished if each.block_ids)):
            yield len(request.block_ids)
            yield from (blocks.setdefault(block_id, len(blocks)) for block_id in request.block_ids)
        findable = [block_id for block_id in (*blocks, *scheduler.pool.free_block_ids) if block_id in cache]
        for block_id in findable:
            chain = self._chain(cache, block_id)
            yield from (blocks.setdefault(block_id, len(blocks)), len(chain))
            yield from names(chain, 0)

    def _chain(self, cache: PrefixCache, block_id: int) -> tuple[int, ...]:
        """All tokens up to the end of a findable block."""
        chain: tuple[int, ...] = ()
        parent: int | str | None = block_id
        while isinstance(parent, int):
            parent, token_ids = cache.link_of(parent)
            chain = token_ids + chain
        return chain


T = TypeVar("T")


@cache
def _fields_of(kind: Any) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[str, ...]]:
    """What reads all fields of a dataclass with slots, and the names of those that are lists."""
    fields = get_type_hints(kind)
    return attrgetter(*fields), tuple(name for name, hint in fields.items() if get_origin(hint) is list)


def _copy_record(record: T) -> T:
    """A copy of a dataclass with slots, its lists copied too."""
    kind: Any = type(record)
    read, lists = _fields_of(kind)
    twin: T = kind(*read(record))
    for name in lists:
        setattr(twin, name, getattr(twin, name).copy())
    return twin


# What Scheduler keeps, by how it is copied: the same object, a list of numbers, or its own rule in _copy_scheduler.
_SHARED = {
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "reserve"),
    *("drafter", "door", "disk", "loads", "_num_arrivals"),
}
_OWN_RULE = {
    *("cache", "pool", "policy", "counters", "notes"),
    *("requests", "waiting", "running", "finished", "free_slots", "_in_flight"),
}


def _copy_scheduler(scheduler: Scheduler, twins: Mapping[int, Request]) -> Scheduler:
    """A scheduler over the twins of its requests (by id() of the original)."""
    fields: dict[str, Any] = vars(scheduler)
    if fields.keys() != _SHARED | _OWN_RULE:
        raise InvariantError(f"no rule to copy {sorted(fields.keys() ^ (_SHARED | _OWN_RULE))} of a scheduler")
    twin = scheduler.__class__.__new__(scheduler.__class__)
    vars(twin).update(fields)
    twin.cache = None if scheduler.cache is None else _copy_cache(scheduler.cache)
    twin.pool = _copy_pool(scheduler.pool, twin.cache)
    twin.policy = copy_policy(scheduler.policy, twins)
    twin.counters = _copy_record(scheduler.counters)
    twin.notes = _copy_record(scheduler.notes)
    twin.requests = {name: twins[id(request)] for name, request in scheduler.requests.items()}
    twin.waiting = OrderedDict((name, twins[id(request)]) for name, request in scheduler.waiting.items())
    twin.running = [twins[id(request)] for request in scheduler.running]
    twin.finished = [twins[id(request)] for request in scheduler.finished]
    twin.free_slots = scheduler.free_slots.copy()
    # The shares are frozen; a request in flight that was released is nobody's any more.
    twin._in_flight = tuple((each, twins.get(id(request), request)) for each, request in scheduler._in_flight)
    return twin


def _copy_pool(pool: BlockPool, cache: PrefixCache | None) -> BlockPool:
    twin = BlockPool.__new__(BlockPool)
    twin.num_blocks, twin.cache, twin._ref_counts = pool.num_blocks, cache, pool._ref_counts.copy()
    twin._free, twin._findable = pool._free.copy(), pool._findable.copy()
    twin._free_in_run, twin._free_runs = pool._free_in_run.copy(), pool._free_runs.copy()
    return twin


def _copy_cache(cache: PrefixCache) -> PrefixCache:
    twin = PrefixCache(cache.block_size)
    twin._links = cache._links.copy()
    twin._blocks = {key: block_ids.copy() for key, block_ids in cache._blocks.items()}
    return twin
