"""Work that lasts as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled when the client hangs up; raises ClientGone then.

    The request's body must have been read: what receive gives from there on is the disconnect.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        # Both have let go of what they hold (a request in the engine, above all) before this returns.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
