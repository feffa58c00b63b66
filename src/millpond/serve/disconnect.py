"""Work that lasts as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up before its answer was complete."""


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], unused: Callable[[T], None] = lambda result: None
) -> T:
    """The result of work, which is cancelled when the client hangs up; raises ClientGone then.

    The request's body must have been read: what receive gives from there on is the disconnect. unused gets a result
    that nobody will have, because the caller was cancelled when it was there already.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    is_used = False
    try:
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            is_gone = not task.done()
        finally:
            task.cancel()
            watcher.cancel()
            # Both have let go of what they hold (a request in the engine, above all) before this returns.
            await asyncio.gather(task, watcher, return_exceptions=True)
        if is_gone:
            raise ClientGone
        is_used = True
        return task.result()
    finally:
        if not is_used and task.done() and not task.cancelled() and task.exception() is None:
            unused(task.result())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
