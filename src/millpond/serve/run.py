"""Serving until told to stop: start the engine and uvicorn, drain on SIGTERM or Ctrl-C, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from millpond.config import LoadLimits, ServerConfig
from millpond.engine.async_engine import AsyncEngine
from millpond.engine.engine import Engine
from millpond.engine.metrics import RequestTimes
from millpond.serve.app import create_app
from millpond.serve.drain import Drain
from millpond.serve.half_open import HalfOpenProtocol
from millpond.serve.open_files import raise_open_files
from millpond.serve.server import Server
from millpond.serve.tls import check_certificate
from millpond.serve.tracing import RequestTracer, otlp_provider


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers at url. stop() does what a stop signal does, from any thread."""

    url: str
    stop: Callable[[], None]


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServerConfig = ServerConfig(),  # noqa: B008 (it cannot be changed)
    *,
    load: LoadLimits | None = None,
    model_names: Sequence[str] | None = None,
    notify: Callable[[str], None] = print,
    on_ready: Callable[[Running], None] | None = None,
) -> None:
    """Serve an engine over HTTP; returns after a stop signal, when requests have drained or were ended.

    port 0 takes a free one. load bounds what is taken on. model_names default to the engine's. notify gets the start-up
    lines; on_ready is called, in the server's thread, once it answers. Raises OSError when the address cannot be bound,
    ConfigError for a certificate that cannot serve, EngineDeadError when the engine has died.
    """
    if config.tls_cert is not None:
        check_certificate(config.tls_cert, config.tls_key)
    with contextlib.closing(_bind(host, port)) as listener:
        names = tuple(model_names or (engine.model_name,))
        asyncio.run(_serve(engine, listener, config, load, names, notify=notify, on_ready=on_ready))


def check_address(host: str, port: int) -> None:
    """Raise OSError for an address that cannot be bound: now, rather than after a model has been loaded."""
    _bind(host, port).close()


async def _serve(
    engine: Engine,
    listener: socket.socket,
    config: ServerConfig,
    load: LoadLimits | None,
    model_names: tuple[str, ...],
    *,
    notify: Callable[[str], None],
    on_ready: Callable[[Running], None] | None,
) -> None:
    async_engine, drain = AsyncEngine(engine, load), Drain()
    app = create_app(
        async_engine,
        model_names=model_names,
        tokenizer=engine.tokenizer,
        chat_template=engine.chat_template,
        config=config,
        drain=drain,
    )
    url = _url(listener, "http" if config.tls_cert is None else "https")

    def ready(server: Server) -> None:
        for line in [*startup_lines(engine, url, model_names), *access_lines(listener.getsockname()[0], config)]:
            notify(line)
        if on_ready is not None:
            on_ready(Running(url, server.stop))

    uvicorn_config = uvicorn.Config(
        app,
        log_config=None,  # it goes where everything else is logged
        log_level=config.log_level,
        access_log=False,
        http=HalfOpenProtocol,
        ws="none",
        lifespan="off",
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    server = Server(uvicorn_config, async_engine, drain, config.drain_timeout, ready)
    with _tracing(async_engine, config, model_names[0]):
        raise_open_files()
        async_engine.start()
        try:
            await server.serve([listener])
        finally:
            await server.stop_engine()
    if server.fault is not None:
        raise server.fault


@contextlib.contextmanager
def _tracing(async_engine: AsyncEngine, config: ServerConfig, model_name: str) -> Iterator[None]:
    """Where traces are asked for: have each request that has ended recorded, in the event loop and not in a step."""
    if config.otlp_endpoint is None:
        yield
        return
    tracer, loop = RequestTracer(otlp_provider(config.otlp_endpoint), model_name), asyncio.get_running_loop()

    def on_end(times: RequestTimes) -> None:
        loop.call_soon_threadsafe(tracer.record, times)

    async_engine.metrics.on_end = on_end
    try:
        yield
    finally:
        async_engine.metrics.on_end = None
        tracer.close()


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


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
    if config.chooses_reserve:
        return "of which the watermark reserves what running requests are likely to need (auto)"
    text = f"of which the watermark reserves {reserve} blocks"
    if reserve == 0 and config.watermark_blocks is None and float(config.watermark) > 0:
        text += f" ({100 * config.watermark:g}% of {num_blocks} blocks is less than one)"
    return text


def access_lines(host: str, config: ServerConfig) -> list[str]:
    """Who may ask, where that is not only this machine."""
    if config.api_keys:
        return [f"requests need an API key, of which there are {len(config.api_keys)}"]
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return []
    return ["no API key is set: whoever reaches this address may use it (see --api-key-file)"]
