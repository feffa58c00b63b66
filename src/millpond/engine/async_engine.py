"""The one thread boundary: handlers on an event loop talk to an engine that turns in a thread of its own.

Requests and aborts go in through an inbox that is drained at the top of a step; what a step gave comes out
with one wake-up of the loop, into the mailbox of each caller.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from millpond.core.sampling import SamplingParams
from millpond.core.step import StepStats
from millpond.engine.engine import Engine
from millpond.engine.limits import RequestLimits
from millpond.engine.metrics import EngineMetrics
from millpond.engine.outputs import RequestOutput
from millpond.errors import EngineDeadError, InvalidRequestError, MillpondError

logger = logging.getLogger(__name__)

JOIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What goes into the inbox. arrived is when it was made, by the engine's clock."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    arrived: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine would not take a request, after all that could be checked beforehand."""

    request_id: str
    error: MillpondError


Abort = str
Item = RequestOutput | Refusal


class Mailbox:
    """What came for one caller, in order. An asyncio.Queue would do, at three times the price per token."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[Item | EngineDeadError] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item | EngineDeadError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Item | EngineDeadError]:
        """All that came since the last call, at least one item; waits for it. For one task at a time."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self._items = self._items, []
        return items


class AsyncEngine:
    """An engine served to one event loop. start() in that loop, shutdown() at the end; both once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._observer = engine.observer
        engine.observer = self._observe
        self.metrics = engine.metrics = engine.metrics or EngineMetrics(engine.scheduler)
        self._inbox: list[EngineRequest | Abort] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="millpond-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._dead: EngineDeadError | None = EngineDeadError("the engine has not started")
        self.last_step: StepStats | None = None

    @property
    def limits(self) -> RequestLimits:
        return self._engine.limits

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken and steps are turned."""
        return self._dead is None and self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """Requests that a caller still waits for."""
        return len(self._mailboxes)

    def start(self) -> None:
        """Start the engine's thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._dead = None
        self._thread.start()

    async def shutdown(self, timeout: float = JOIN_SECONDS) -> None:
        """Stop after the step in progress, waiting for it at most timeout seconds. Callers get EngineDeadError."""
        self._fail_all(EngineDeadError("the engine is shutting down"))
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout)
        if self._thread.is_alive():
            logger.error("the step in progress has not ended in %g s; the engine's thread is left behind", timeout)

    def check_alive(self) -> None:
        """Raise EngineDeadError when no request would be served."""
        if self._dead is not None:
            raise _copy(self._dead)

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        """What each step gives this request, until it ends. Closing the generator aborts the request.

        Raises InvalidRequestError before the first output, EngineDeadError at any time.
        """
        return self.generate_all([EngineRequest(request_id, prompt_token_ids, sampling)])

    async def generate_all(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[RequestOutput]:
        """Several requests as one stream of outputs, until all have ended. Closing it aborts those that have not."""
        self.check_alive()
        for request in requests:
            self.limits.check(request.prompt_token_ids, request.sampling)
            if request.request_id in self._mailboxes:
                raise InvalidRequestError(f"request id {request.request_id!r} is already in use", "request_id")
        mailbox = Mailbox()
        unfinished = {request.request_id for request in requests}
        self._mailboxes.update(dict.fromkeys(unfinished, mailbox))
        self._send(requests)
        try:
            while unfinished:
                for item in await mailbox.take():
                    output = _unwrap(item)
                    if output.finish_reason is not None:
                        unfinished.discard(output.request_id)
                    yield output
                    if not unfinished:
                        break
        finally:
            for request in requests:
                self._mailboxes.pop(request.request_id, None)
            self._send(sorted(unfinished))

    def _send(self, messages: Sequence[EngineRequest | Abort]) -> None:
        if not messages:
            return
        with self._wake:
            self._inbox.extend(messages)
            self._wake.notify()

    # Below: the engine's thread, but for _hand_out and _fail_all, which it posts to the loop.

    def _run(self) -> None:
        try:
            while (messages := self._next_messages()) is not None:
                items: list[Item] = self._drain(messages)
                if self._engine.has_unfinished:
                    items += self._engine.step()
                if items:
                    self._post(items)
            self._engine.abort_all()
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
            return messages

    def _drain(self, messages: Sequence[EngineRequest | Abort]) -> list[Item]:
        refused: list[Item] = []
        for message in messages:
            if isinstance(message, Abort):
                self._engine.abort(message)
                continue
            try:
                self._engine.add_request(
                    message.request_id, message.prompt_token_ids, message.sampling, message.arrived
                )
            except MillpondError as error:
                refused.append(Refusal(message.request_id, error))
        return refused

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

    def _post(self, items: Sequence[Item]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._hand_out, items)

    def _hand_out(self, items: Sequence[Item]) -> None:
        for item in items:
            mailbox = self._mailboxes.get(item.request_id)
            if mailbox is not None:
                mailbox.put(item)

    def _fail_all(self, dead: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = dead
        for mailbox in set(self._mailboxes.values()):
            mailbox.put(dead)


def _unwrap(item: Item | EngineDeadError) -> RequestOutput:
    if isinstance(item, RequestOutput):
        return item
    if isinstance(item, Refusal):
        raise item.error
    raise _copy(item)


def _copy(dead: EngineDeadError) -> EngineDeadError:
    """An exception of its own for each caller, so that no two grow one traceback."""
    fresh = EngineDeadError(str(dead))
    fresh.__cause__ = dead.__cause__
    return fresh
