"""One caller's requests, and what has come for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from millpond.core.sampling import SamplingParams
from millpond.engine.outputs import RequestOutput
from millpond.errors import MillpondError

MOST_DEADLINE_MS = 86_400_000  # a day


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is taken of one answer. priority and tenant are for the policy.

    timeout bounds the whole of it, in seconds from when it is taken; None is what the server has. deadline_ms is the
    time in which the answer is of use, which ends at deadline_at, by the clock of who has taken it. arrived is when it
    was made, by the engine's clock.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    timeout: float | None = None
    deadline_ms: int | None = None
    deadline_at: float | None = None
    priority: int = 0
    tenant: str = ""
    arrived: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine would not take a request, after all that could be checked beforehand."""

    request_id: str
    error: MillpondError


Item = RequestOutput | Refusal


class Mailbox:
    """What came for one caller, in order. An asyncio.Queue would do, at three times the price per token."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[Item | MillpondError] = []
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item | MillpondError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def replace(self, error: MillpondError) -> None:
        """Forget what nobody has read; the reader gets the error instead."""
        self._items.clear()
        self.put(error)

    async def take(self) -> list[Item | MillpondError]:
        """All that came since the last call, at least one item; waits for it. For one task at a time."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self._items = self._items, []
        return items


@dataclass(slots=True, eq=False)
class Call:
    """Requests that were taken together and end together. unfinished holds the ids that have not ended for the reader.

    is_waiting until the first of them is admitted; is_overdue once its time has passed; is_over once the caller has let
    go of it. cause is why what has not ended by then is aborted.
    """

    requests: Sequence[EngineRequest]
    mailbox: Mailbox
    unfinished: set[str]
    is_waiting: bool = True
    is_overdue: bool = False
    is_over: bool = False
    is_suspected: bool = False
    cause: str = "client_gone"
