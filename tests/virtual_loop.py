"""An event loop whose time passes only when nothing else is left to do: hours of timers in no time, exact to the digit.

Connections are pairs of sockets in this process: what one end has written, the other can read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits for something that never comes"
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Whoever connects, to any address, speaks with `serve`, once for each connection."""

    def __init__(self, serve: Serve | None = None) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()

    def time(self) -> float:
        return self._virtual.now

    def hold_up(self, seconds: float) -> None:
        """As if something had kept the processor from this loop."""
        self._virtual.now += seconds

    async def create_connection(self, protocol_factory, host=None, port=None, **settings):
        if host is None:
            return await super().create_connection(protocol_factory, **settings)
        if self._serve is None:
            raise ConnectionRefusedError(f"nobody listens on port {port}")
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs)
        task = self.create_task(self._attend(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await super().create_connection(protocol_factory, sock=ours)

    async def _attend(self, reader, writer) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._serve(reader, writer)  # until the client hangs up


def run_virtually(work: Callable[[], Awaitable[T]], serve: Serve | None = None) -> T:
    """The result of work() on a loop of its own that begins at time 0."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(serve)) as runner:
        return runner.run(work())
