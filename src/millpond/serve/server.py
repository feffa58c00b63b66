"""uvicorn with a bounded end: running answers may end by themselves, then the rest get an error and end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from millpond.engine.async_engine import JOIN_SECONDS, AsyncEngine
from millpond.errors import EngineDeadError
from millpond.serve.drain import Drain

# After the engine has told the last callers that it is gone, their sockets need a moment to hear it.
FAREWELL_SECONDS = 5.0
# What a second stop signal leaves for the step in progress, and for handlers to see that their clients are gone.
FORCED_SECONDS = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """Serves until a stop signal or the engine's death, which is in `fault` then.

    A first stop signal drains, a second ends at once. serve() returns either way, with no signal raised again. To be
    made in the event loop that it serves in.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        async_engine: AsyncEngine,
        drain: Drain,
        drain_timeout: float,
        ready: Callable[[Server], None],
    ) -> None:
        super().__init__(config)
        self.fault: EngineDeadError | None = None
        self._async_engine = async_engine
        self._drain = drain
        self._drain_timeout = drain_timeout
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._forced = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready(self)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop: told to, or with an engine that will never answer again."""
        try:
            self._async_engine.check_alive()
        except EngineDeadError as error:
            self.fault = error
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain.begin()
        end_of_drain = asyncio.create_task(self._end_of_drain())
        try:
            await super().shutdown(sockets)
        finally:
            end_of_drain.cancel()

    async def _end_of_drain(self) -> None:
        await self._unless_forced(self._drain_timeout)
        await self.stop_engine()
        await self._unless_forced(FAREWELL_SECONDS)
        # Who is still connected does not read. Handlers take a cut connection for a client that hung up.
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=FORCED_SECONDS)
        self.force_exit = True

    async def stop_engine(self) -> None:
        """Stop the engine; a step in progress is waited for, but not long by who wants to end at once."""
        await self._async_engine.shutdown(FORCED_SECONDS if self._forced.is_set() else JOIN_SECONDS)

    async def _unless_forced(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._forced.wait(), seconds)

    def stop(self) -> None:
        """What a stop signal does. From any thread, and from a signal's handler."""
        if self.should_exit and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forced.set)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but a drained server has done what the signal asked for: it exits with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {each: signal.signal(each, self.handle_exit) for each in STOP_SIGNALS}
        try:
            yield
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)
