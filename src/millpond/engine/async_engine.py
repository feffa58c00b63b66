"""The one thread boundary: handlers on an event loop talk to an engine that turns in a thread of its own.

Requests and aborts go in through an inbox that is drained at the top of a step; what a step gave comes out
with one wake-up of the loop, into the mailbox of each caller.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

from millpond.config import LoadLimits
from millpond.core.request import FinishReason
from millpond.core.step import Clock, StepStats
from millpond.engine.call import MOST_DEADLINE_MS, Call, EngineRequest, Item, Mailbox, Refusal
from millpond.engine.deadlines import Deadlines, Expiries, Limit, missed_deadline, overdue
from millpond.engine.engine import Engine
from millpond.engine.estimate import Estimate, estimate
from millpond.engine.limits import RequestLimits
from millpond.engine.metrics import EngineMetrics
from millpond.engine.outputs import RequestOutput
from millpond.engine.timeline import NOWHERE, Origin
from millpond.engine.timelines import Timelines
from millpond.engine.waiting_room import WaitingRoom
from millpond.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    MillpondError,
    OverloadedError,
    RequestTimeoutError,
    SlowReaderError,
    shown,
)

logger = logging.getLogger(__name__)

JOIN_SECONDS = 10.0


class Abort(NamedTuple):
    """A message to the engine: end this request."""

    request_id: str
    cause: str


class AsyncEngine:
    """An engine served to one event loop. start() in that loop, shutdown() at the end; both once.

    clock is read for timeouts, for the speed at which the queue drains, and for how long a step has taken.
    """

    def __init__(self, engine: Engine, load: LoadLimits | None = None, clock: Clock = time.monotonic) -> None:
        self._engine = engine
        self._observer = engine.observer
        engine.observer = self._observe
        self.metrics = engine.metrics = engine.metrics or EngineMetrics(engine.scheduler)
        self.timelines = engine.timelines = engine.timelines or Timelines(engine.scheduler, engine.now)
        self.load = load or LoadLimits()
        self._clock = clock
        self._inbox: list[EngineRequest | Abort] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="millpond-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[str, Call] = {}
        self._room = WaitingRoom(self.load, engine.config.max_num_seqs)
        self._deadlines = Deadlines()
        self._expiries = Expiries()
        self._alarm: asyncio.TimerHandle | None = None
        self._dead: EngineDeadError | None = EngineDeadError("the engine has not started")
        self._step_began: float | None = None
        self.last_step: StepStats | None = None

    @property
    def limits(self) -> RequestLimits:
        return self._engine.limits

    @property
    def trouble(self) -> str | None:
        """Why requests are not served: the engine is dead, or the step in progress takes too long. None if they are."""
        if self._dead is not None:
            return str(self._dead)
        if not self._thread.is_alive():
            return "the engine's thread has ended"
        began = self._step_began
        seconds = 0.0 if began is None else self._clock() - began
        if seconds > self.load.stuck_after:
            return f"the engine is stuck: the step in progress has taken {seconds:.0f} s, more than {self._stuck_after}"
        return None

    @property
    def _stuck_after(self) -> str:
        return f"{self.load.stuck_after:g} s"

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken and steps are turned."""
        return self.trouble is None

    @property
    def num_unfinished(self) -> int:
        """Requests that a caller still waits for."""
        return len(self._calls)

    @property
    def num_queued(self) -> int:
        """Requests that were taken and that no step has admitted yet."""
        return self._room.num_waiting

    def start(self) -> None:
        """Start the engine's thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._dead = None
        self._thread.start()

    async def shutdown(self, timeout: float = JOIN_SECONDS) -> None:
        """Stop after the step in progress and let the disk be written to its end, for at most timeout seconds.

        Callers get EngineDeadError.
        """
        self._fail_all(EngineDeadError("the engine is shutting down"))
        if self._alarm is not None:
            self._alarm.cancel()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout)
        if self._thread.is_alive():
            what = "writing prefixes to disk" if self._is_closing else "the step in progress"
            num = self._engine.num_unwritten
            and_so = f", and {num} blocks of K/V are not on disk" if num else ""
            logger.error("%s has not ended in %g s; the engine's thread is left behind%s", what, timeout, and_so)

    def check_alive(self) -> None:
        """Raise EngineDeadError when no request would be served."""
        if self._dead is not None:
            raise _copy(self._dead)

    def check_room(self, num_requests: int, least_tokens: int) -> None:
        """Raise OverloadedError for a call that finds no room, whatever its prompts are: before work is put into them.

        least_tokens is what they have together at the least. EngineDeadError and InvalidRequestError as in take().
        """
        self.check_alive()
        try:
            self._room.check(self._clock(), num_requests, least_tokens, slots_are_free=self._slots_are_free)
        except OverloadedError as error:
            self.metrics.turned_away[f"waiting_{error.bound}"] += 1
            raise

    @property
    def _slots_are_free(self) -> bool:
        return self.last_step is None or self.last_step.num_waiting == 0

    @asynccontextmanager
    async def in_time(self, timeout: float | None) -> AsyncIterator[None]:
        """What is done for a request before it is taken, cancelled when that takes longer than its timeout, or the
        server's where it has none. Raises RequestTimeoutError then, InvalidRequestError for what is no timeout."""
        _check_timeout(timeout, self.load.request_timeout)
        seconds = self.load.request_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            error = overdue(seconds or 0.0)
            self.metrics.turned_away[error.code] += 1
            raise error from None

    def take(self, requests: Sequence[EngineRequest], origin: Origin = NOWHERE) -> Call:
        """Queue requests that belong together, all of them or none; outputs() gives what comes of them.

        origin is for their timelines.
        Whoever takes must let go again: outputs() does when it ends or is closed, otherwise release() does.
        Raises OverloadedError, DeadlineError, InvalidRequestError naming the field, or EngineDeadError.
        """
        for request in requests:
            self.limits.check(request.prompt_token_ids, request.sampling)
            self.limits.check_priority(request.priority)
            _check_timeout(request.timeout, self.load.request_timeout)
            _check_deadline(request.deadline_ms)
            if request.request_id in self._calls:
                raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        num_tokens_of = {request.request_id: len(request.prompt_token_ids) for request in requests}
        self.check_room(len(num_tokens_of), sum(num_tokens_of.values()))
        now = self._clock()
        self._check_deadlines(now, requests)
        self._room.enter(now, num_tokens_of)
        call = Call(requests, Mailbox(), set(num_tokens_of))
        self._calls.update(dict.fromkeys(num_tokens_of, call))
        self._set_deadlines(now, call)
        for request in requests:
            self.timelines.take(request.request_id, request.arrived, len(request.prompt_token_ids), origin)
        self._send([_dated(now, request) for request in requests])
        return call

    def _check_deadlines(self, now: float, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            if request.deadline_ms is None:
                continue
            expected = self._estimate(now, request)
            if 1000 * expected.seconds > request.deadline_ms:
                self.metrics.turned_away["deadline_unreachable"] += 1
                raise DeadlineError(
                    f"the answer could not be there within deadline_ms {request.deadline_ms}: {expected}"
                )

    def _estimate(self, now: float, request: EngineRequest) -> Estimate:
        """An answer that may end early is taken to be as long as those of late; as the others, where it can't."""
        sampling, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
        most = self.limits.check(request.prompt_token_ids, sampling)
        usual = min(most, max(sampling.min_tokens, self._room.mean_output_tokens))
        num_tokens = most if sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids) else usual
        num_before = self._num_before(request)
        waiting = 0.0
        if num_before or self.limits.policy == "fcfs":  # else it may take somebody's place
            waiting = self._room.seconds_to_wait(now, num_before, slots_are_free=self._slots_are_free)
        config = self._engine.config
        tokens_a_step = 1.0 if config.speculative == "off" else 1.0 + config.speculative_tokens
        num_running = min(self._room.num_inside, config.max_num_seqs - 1)
        counters = self._engine.scheduler.counters
        found = counters.hit_tokens / max(1, counters.queried_tokens)  # of other prompts, in the prefix cache
        return estimate(
            self._engine.prices,
            waiting,
            (1.0 - found) * num_prompt_tokens,
            num_tokens,
            num_running=num_running,
            tokens_a_step=tokens_a_step,
        )

    def _num_before(self, request: EngineRequest) -> int:
        """How many of those who wait go before it for sure, by the policy."""
        policy = self.limits.policy
        if policy == "fcfs":
            return self._room.num_waiting
        waiting = [each for call in set(self._calls.values()) if call.is_waiting for each in call.requests]
        if policy == "priority":
            return sum(each.priority <= request.priority for each in waiting)
        return sum(each.tenant == request.tenant for each in waiting)

    def release(self, call: Call) -> None:
        """Let go of a call: what of it has not ended is aborted. Once is enough, and more does no harm."""
        if call.is_over:
            return
        call.is_over = True
        request_ids = [request.request_id for request in call.requests]
        for request_id in request_ids:
            self._calls.pop(request_id, None)
        self._room.leave(request_ids)
        self._send([Abort(request_id, call.cause) for request_id in sorted(call.unfinished)])

    async def outputs(self, call: Call) -> AsyncGenerator[RequestOutput]:
        """What each step gives the requests of a call, until all have ended. Closing it aborts those that have not.

        Raises RequestTimeoutError, EngineDeadError, and SlowReaderError where it was not read for too long.
        """
        try:
            while call.unfinished:
                for item in await call.mailbox.take():
                    output = _unwrap(item)
                    if output.finish_reason is not None:
                        call.unfinished.discard(output.request_id)
                        if output.finish_reason is FinishReason.ERROR:
                            call.cause = "another_choice_failed"
                    yield output
                    if not call.unfinished:
                        break
        finally:
            self.release(call)

    def end_overdue(self) -> None:
        """End the calls whose time is over. An alarm calls this when the next one's is."""
        for call, error in self._deadlines.due(self._clock()):
            self._tell_overdue(call, error)
        self._set_alarm()

    def _tell_overdue(self, call: Call, error: RequestTimeoutError) -> None:
        """Once: the engine's thread may find the same as the alarm."""
        if not call.is_overdue:
            call.is_overdue = True
            self.metrics.turned_away[error.code] += 1
            call.cause = error.code
            call.mailbox.put(error)

    def _set_deadlines(self, now: float, call: Call) -> None:
        timeouts = [request.timeout for request in call.requests if request.timeout is not None]
        if (in_all := min(timeouts, default=self.load.request_timeout)) is not None:
            self._deadlines.add(now, call, in_all, Limit.REQUEST)
        if self.load.queue_timeout is not None:
            self._deadlines.add(now, call, self.load.queue_timeout, Limit.QUEUE)
        deadlines = [request.deadline_ms for request in call.requests if request.deadline_ms is not None]
        if deadlines:
            self._deadlines.add(now, call, min(deadlines) / 1000, Limit.DEADLINE)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """One timer for the soonest deadline; those that no longer count have none."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if (moment := self._deadlines.next) is not None:
            assert self._loop is not None
            self._alarm = self._loop.call_later(max(0.0, moment - self._clock()), self.end_overdue)

    def _send(self, messages: Sequence[EngineRequest | Abort]) -> None:
        if not messages:
            return
        with self._wake:
            self._inbox.extend(messages)
            self.metrics.num_queued += sum(not isinstance(each, Abort) for each in messages)
            self._wake.notify()

    # Below: the engine's thread, but for _hand_out and what follows it, which it posts to the loop.

    def _run(self) -> None:
        try:
            while (messages := self._next_messages()) is not None:
                self._step_began = self._clock()
                items: list[Item] = self._drain(messages) + self._expire()
                admitted: tuple[str, ...] = ()
                if self._engine.has_unfinished:
                    items += self._engine.step()
                    admitted = self._engine.admitted
                    self._expiries.forget(admitted)
                self._step_began = None
                if items or admitted:
                    self._post(items, admitted)
            self._engine.abort_all()
            self._is_closing = True
            self._engine.close()
        except BaseException as error:
            request_ids = ", ".join(self._engine.unfinished_ids)
            logger.exception("the engine's thread died; requests that end with it: %s", request_ids or "none")
            self._die(error)

    def _next_messages(self) -> list[EngineRequest | Abort] | None:
        """What came in since the last step; sleeps while there is nothing to do; None when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._stopping or self._engine.has_unfinished):
                self._wake.wait()
            if self._stopping:
                return None
            messages, self._inbox = self._inbox, []
            self.metrics.num_queued = 0
            return messages

    def _drain(self, messages: Sequence[EngineRequest | Abort]) -> list[Item]:
        refused: list[Item] = []
        for message in messages:
            if isinstance(message, Abort):
                self._engine.abort(message.request_id, message.cause)
                self._expiries.forget([message.request_id])
                continue
            try:
                self._engine.add_request(
                    message.request_id,
                    message.prompt_token_ids,
                    message.sampling,
                    message.arrived,
                    priority=message.priority,
                    tenant=message.tenant,
                )
                if message.deadline_ms is not None and message.deadline_at is not None:
                    self._expiries.add(message.request_id, message.deadline_at, message.deadline_ms)
            except MillpondError as error:
                self.timelines.drop(message.request_id)
                refused.append(Refusal(message.request_id, error))
        return refused

    def _expire(self) -> list[Item]:
        """Give up those whose deadline has passed before they began: none of them costs a step anything."""
        late = self._expiries.due(self._clock()) if self._expiries else {}
        refusals = [(request_id, missed_deadline(deadline_ms, True)) for request_id, deadline_ms in late.items()]
        for request_id, error in refusals:
            self._engine.abort(request_id, error.code)
        return [Refusal(request_id, error) for request_id, error in refusals]

    def _observe(self, stats: StepStats) -> None:
        self.last_step = stats
        if self._observer is not None:
            self._observer(stats)

    def _die(self, cause: BaseException) -> None:
        # Only texts that were written for users go out to them; the rest is in the log.
        detail = str(cause) if isinstance(cause, MillpondError) else type(cause).__name__
        dead = EngineDeadError(f"the engine has died: {detail}")
        dead.__cause__ = cause
        self._dead = dead
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_all, dead)

    def _post(self, items: Sequence[Item], admitted: Sequence[str]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._hand_out, items, admitted)

    def _hand_out(self, items: Sequence[Item], admitted: Sequence[str]) -> None:
        if admitted:
            self._admit(admitted)
        for item in items:
            call = self._calls.get(item.request_id)
            if call is None:
                continue
            if isinstance(item, Refusal) and isinstance(item.error, RequestTimeoutError):
                self._tell_overdue(call, item.error)
            else:
                call.mailbox.put(item)
            if isinstance(item, Refusal) or item.finish_reason is not None:
                self._end(item)
            elif len(call.mailbox) > self.load.max_unread_outputs and not call.is_suspected:
                self._suspect(call)

    def _admit(self, request_ids: Sequence[str]) -> None:
        self._room.admit(request_ids)
        for request_id in request_ids:
            if (call := self._calls.get(request_id)) is not None:
                call.is_waiting = False

    def _end(self, item: Item) -> None:
        """The engine is done with a request, whether its caller has read that or not."""
        self._room.leave([item.request_id])
        if isinstance(item, RequestOutput):
            self._room.finish(self._clock(), item.num_prompt_tokens, item.num_output_tokens)

    def _suspect(self, call: Call) -> None:
        """A reader that the loop gave no turn has read nothing either: look again after it has had one."""
        if len(call.mailbox) > self.load.max_unread_outputs * len(call.requests):
            assert self._loop is not None
            call.is_suspected = True
            self._loop.call_soon(self._end_unread, call)

    def _end_unread(self, call: Call) -> None:
        call.is_suspected = False
        num_unread = len(call.mailbox)
        if call.is_over or num_unread <= self.load.max_unread_outputs * len(call.requests):
            return
        name = call.requests[0].request_id
        logger.warning("request %s is aborted: its client has left %d outputs unread", name, num_unread)
        self.metrics.turned_away["slow_reader"] += 1
        call.cause = "slow_reader"
        self.release(call)
        call.mailbox.replace(SlowReaderError(f"the answer was ended: {num_unread} pieces of it were left unread"))

    def _fail_all(self, dead: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = dead
        for call in set(self._calls.values()):
            call.mailbox.put(dead)


def _check_timeout(seconds: float | None, most: float | None) -> None:
    if seconds is None:
        return
    if not seconds > 0:
        raise InvalidRequestError(f"timeout must be a number of seconds above 0, got {shown(seconds)}", "timeout")
    if most is not None and seconds > most:
        raise InvalidRequestError(f"timeout may be at most {most:g} s on this server, got {shown(seconds)}", "timeout")


def _dated(now: float, request: EngineRequest) -> EngineRequest:
    return request if request.deadline_ms is None else replace(request, deadline_at=now + request.deadline_ms / 1000)


def _check_deadline(deadline_ms: int | None) -> None:
    if deadline_ms is not None and not 1 <= deadline_ms <= MOST_DEADLINE_MS:
        raise InvalidRequestError(
            f"deadline_ms must be from 1 to {MOST_DEADLINE_MS} milliseconds, got {shown(deadline_ms)}", "deadline_ms"
        )


def _unwrap(item: Item | MillpondError) -> RequestOutput:
    if isinstance(item, RequestOutput):
        return item
    if isinstance(item, Refusal):
        raise item.error
    raise _copy(item) if isinstance(item, EngineDeadError) else item


def _copy(dead: EngineDeadError) -> EngineDeadError:
    """An exception of its own for each caller, so that no two grow one traceback."""
    fresh = EngineDeadError(str(dead))
    fresh.__cause__ = dead.__cause__
    return fresh
