"""Serving until told to stop: start the engine and uvicorn, drain on SIGTERM or Ctrl-C, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import uvicorn

from millpond.config import LoadLimits
from millpond.engine.async_engine import AsyncEngine
from millpond.engine.engine import Engine
from millpond.serve.app import create_app
from millpond.serve.half_open import HalfOpenProtocol
from millpond.serve.open_files import raise_open_files

DRAIN_SECONDS = 30.0
# After the engine has told the last callers that it is gone, their sockets need a moment to hear it.
FAREWELL_SECONDS = 5.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers at url. stop() does what a stop signal does, from any thread."""

    url: str
    stop: Callable[[], None]


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    load: LoadLimits | None = None,
    model_names: Sequence[str] | None = None,
    drain_seconds: float = DRAIN_SECONDS,
    notify: Callable[[str], None] = print,
    on_ready: Callable[[Running], None] | None = None,
    log_level: str = "warning",
) -> None:
    """Serve an engine over HTTP; returns after a stop signal, when requests have drained or were ended.

    port 0 takes a free one. load bounds what is taken on. model_names default to the engine's. notify gets the start-up
    lines; on_ready is called, in the server's thread, once it answers. Raises OSError when the address cannot be bound.
    """
    with contextlib.closing(_bind(host, port)) as listener:
        asyncio.run(
            _serve(
                engine,
                listener,
                load=load,
                model_names=tuple(model_names or (engine.model_name,)),
                drain_seconds=drain_seconds,
                notify=notify,
                on_ready=on_ready,
                log_level=log_level,
            )
        )


def check_address(host: str, port: int) -> None:
    """Raise OSError for an address that cannot be bound: now, rather than after a model has been loaded."""
    _bind(host, port).close()


async def _serve(
    engine: Engine,
    listener: socket.socket,
    *,
    load: LoadLimits | None,
    model_names: tuple[str, ...],
    drain_seconds: float,
    notify: Callable[[str], None],
    on_ready: Callable[[Running], None] | None,
    log_level: str,
) -> None:
    async_engine = AsyncEngine(engine, load)
    app = create_app(
        async_engine, model_names=model_names, tokenizer=engine.tokenizer, chat_template=engine.chat_template
    )
    config = uvicorn.Config(
        app,
        log_level=log_level,
        http=HalfOpenProtocol,
        lifespan="off",
        timeout_graceful_shutdown=int(drain_seconds + FAREWELL_SECONDS) + 1,
    )
    url = _url(listener)

    def ready(server: Server) -> None:
        for line in startup_lines(engine, url, model_names):
            notify(line)
        if on_ready is not None:
            on_ready(Running(url, server.stop))

    raise_open_files()
    async_engine.start()
    try:
        await Server(config, async_engine, drain_seconds, ready).serve([listener])
    finally:
        await async_engine.shutdown()


class Server(uvicorn.Server):
    """uvicorn with a bounded drain: running answers may end by themselves, then the rest get an error and end.

    A first stop signal drains, a second ends at once. serve() returns either way, with no signal raised again.
    """

    def __init__(
        self, config: uvicorn.Config, async_engine: AsyncEngine, drain_seconds: float, ready: Callable[[Server], None]
    ) -> None:
        super().__init__(config)
        self._async_engine = async_engine
        self._drain_seconds = drain_seconds
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end_of_drain = asyncio.create_task(self._end_of_drain())
        try:
            await super().shutdown(sockets)
        finally:
            end_of_drain.cancel()

    async def _end_of_drain(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        await self._async_engine.shutdown()

    def stop(self) -> None:
        self.force_exit = self.should_exit
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


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:  # a label that is empty or too long
        raise OSError(errno.EINVAL, f"{host[:100]!r} is not a host name") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def startup_lines(engine: Engine, url: str, model_names: Sequence[str]) -> list[str]:
    """What a person should know when the server answers: where, what, and how the pool is made."""
    num_blocks, block_size = engine.scheduler.pool.num_blocks, engine.scheduler.block_size
    threads = "" if engine.config.threads is None else f"{engine.config.threads} threads, "
    num_tokens, kv_memory = num_blocks * block_size, engine.config.kv_memory
    each = "" if kv_memory is None else f", {kv_memory // num_tokens:,} bytes each"
    return [
        f"millpond serves {', '.join(model_names)} at {url}",
        f"{threads}{num_blocks} blocks of {block_size} tokens for K/V ({num_tokens} tokens in {engine.config.kv_type}"
        f"{each}), {_reserve(engine)}",
    ]


def _reserve(engine: Engine) -> str:
    config, num_blocks, reserve = engine.config, engine.scheduler.pool.num_blocks, engine.scheduler.watermark_blocks
    text = f"of which the watermark reserves {reserve} blocks"
    if reserve == 0 and config.watermark_blocks is None and config.watermark > 0:
        text += f" ({100 * config.watermark:g}% of {num_blocks} blocks is less than one)"
    return text
