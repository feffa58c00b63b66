"""The timelines of an engine's requests: all that are unfinished, and of the others the last thousand.

Written at changes alone: a step in which everybody decodes costs a few comparisons, however many requests run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic

from millpond.core.block_pool import blocks_for_length
from millpond.core.notes import Blocked, Preemption
from millpond.core.request import Request
from millpond.core.scheduler import Scheduler
from millpond.core.step import Clock, SchedulerOutput
from millpond.engine.timeline import NOWHERE, Counts, Origin, Summary, Timeline

MOST_FINISHED = 1000


class Timelines:
    """One engine's. Its thread writes, but for take() and drop(); any thread reads.

    clock is the engine's. A finished timeline keeps no token and no text of its request.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock = monotonic, most_finished: int = MOST_FINISHED) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.most_finished = most_finished
        self._unfinished: dict[str, Timeline] = {}
        self._finished: dict[str, Timeline] = {}
        self._in_order: deque[Timeline] = deque()  # of their ends
        self._computing: dict[str, Timeline] = {}  # who lacks more than its next token
        self._head: Timeline | None = None  # who lacked something at the head of waiting

    # What any thread may ask.

    @property
    def unfinished(self) -> list[Timeline]:
        """Oldest first."""
        return list(self._unfinished.values())

    def get(self, request_id: str) -> Timeline | None:
        """The timeline of one of the engine's requests."""
        return self._unfinished.get(request_id) or self._finished.get(request_id)

    def find(self, name: str) -> list[Timeline]:
        """Those of the request of this id, or of all that came by this other name, oldest first."""
        if (exact := self.get(name)) is not None:
            return [exact]
        # A request that ends between the two looks is in both.
        every = {id(each): each for each in (*list(self._finished.values()), *self.unfinished)}
        return [each for each in every.values() if name in each.origin.names]

    def places(self) -> dict[str, int]:
        """How many others each one that waits has in front of it, by id, in the order of the queue."""
        waiting = list(self.scheduler.waiting)
        known = set(waiting)
        queued = [each.request_id for each in self.unfinished if each.state == "queued"]
        return {name: place for place, name in enumerate([*waiting, *(each for each in queued if each not in known)])}

    def summary(self, request_ids: Sequence[str]) -> Summary | None:
        """Of the requests of one answer together, as far as they are known here."""
        now, found = self.clock(), map(self.get, request_ids)
        known = [each.summary(now) for each in found if each is not None]
        return Summary.joined(known) if known else None

    # What the event loop tells: requests that the engine will see when the step in progress is over.

    def take(self, request_id: str, arrived: float, num_prompt_tokens: int, origin: Origin) -> None:
        self._unfinished[request_id] = Timeline(request_id, arrived, Counts(num_prompt_tokens), origin)

    def drop(self, request_id: str) -> None:
        """The engine would not have it."""
        timeline = self._unfinished.get(request_id)
        if timeline is not None and timeline.request is None:
            del self._unfinished[request_id]

    # What the engine's thread tells.

    def add(self, request: Request, arrived: float) -> None:
        """A request that now waits."""
        timeline = self._unfinished.get(request.request_id)
        if timeline is None:
            timeline = Timeline(request.request_id, arrived, Counts.of(request), NOWHERE)
            self._unfinished[request.request_id] = timeline
        timeline.add(
            "queued",
            self.scheduler.counters.iterations,
            timeline.arrived,
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            behind=self.scheduler.num_waiting - 1,
        )
        timeline.request = request

    def begin(self, plan: SchedulerOutput, time: float) -> None:
        """What a step decided: told before its forward, so that it is known while that goes on."""
        notes = self.scheduler.notes
        for preemption in notes.preemptions:
            self._preempt(preemption, plan.step, time)
        for request_id in plan.admitted:
            self._admit(request_id, plan.step, time)
        if notes.blocked is not None or self._head is not None:
            self._block(notes.blocked, plan.step, time)

    def step(self, step: int, time: float) -> None:
        """What has come of a step, after its tokens have been taken in."""
        if self._computing:
            self._compute(step, time)
        for request in self.scheduler.finished:
            self.end(request, step, time)

    def end(self, request: Request, step: int, time: float, cause: str | None = None) -> None:
        """A request that has ended; cause is who or what aborted it, where that is known."""
        timeline = self._unfinished.get(request.request_id)
        if timeline is None or timeline.request is not request or request.finish_reason is None:
            return
        timeline.stop_waiting(time)
        self._computing.pop(request.request_id, None)
        reason, counts = request.finish_reason.value, Counts.of(request)
        timeline.add(
            "finished", step, time, reason=reason, cause=cause, error=request.error, output_tokens=counts.output_tokens
        )
        timeline.counts_kept = counts._replace(blocks=0)
        timeline.finish_reason = reason
        timeline.request = None
        self._keep(timeline)

    def _keep(self, timeline: Timeline) -> None:
        """Never in neither of the two places: a reader looks among the unfinished first."""
        self._finished[timeline.request_id] = timeline
        self._in_order.append(timeline)
        del self._unfinished[timeline.request_id]
        while len(self._in_order) > self.most_finished:
            oldest = self._in_order.popleft()
            if self._finished.get(oldest.request_id) is oldest:  # its id may have come again
                del self._finished[oldest.request_id]

    def _preempt(self, preemption: Preemption, step: int, time: float) -> None:
        request_id, by, num_blocks, num_computed_tokens = preemption
        timeline = self._unfinished.get(request_id)
        if timeline is None:
            return
        other = None if by == request_id else by
        timeline.add("preempted", step, time, by=other, blocks=num_blocks, computed_tokens=num_computed_tokens)
        timeline.num_preemptions += 1
        timeline.waiting_since = time
        self._computing.pop(request_id, None)

    def _admit(self, request_id: str, step: int, time: float) -> None:
        timeline = self._unfinished.get(request_id)
        if timeline is None or (request := timeline.request) is None:
            return
        timeline.stop_waiting(time)
        timeline.add(
            "resumed" if timeline.num_preemptions else "admitted",
            step,
            time,
            blocks=blocks_for_length(request.num_tokens_at_admission, self.scheduler.block_size),
            tokens=request.num_tokens_at_admission,
            found_tokens=request.num_cached_tokens,
        )
        timeline.computed = request.num_cached_tokens
        self._computing[request_id] = timeline

    def _block(self, blocked: Blocked | None, step: int, time: float) -> None:
        timeline = None if blocked is None else self._unfinished.get(blocked.request_id)
        if self._head is not None and self._head is not timeline:
            self._head.unblock(time)
        self._head = timeline
        if timeline is not None and blocked is not None:
            timeline.block(blocked, step, time)

    def _compute(self, step: int, time: float) -> None:
        for request_id, timeline in list(self._computing.items()):
            request = timeline.request
            assert request is not None
            computed = min(request.num_computed_tokens, request.num_tokens_at_admission)
            if computed > timeline.computed:
                timeline.compute(computed - timeline.computed, timeline.num_preemptions > 0, step, time)
            if computed < request.num_tokens_at_admission:
                continue
            del self._computing[request_id]
            if not timeline.has_first_token and request.output_token_ids:
                timeline.has_first_token = True
                timeline.add("first_token", step, time)
