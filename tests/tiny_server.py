"""The API over a tiny engine: in memory through httpx, driven by hand as ASGI, or on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields

import httpx

from millpond.config import ServerConfig
from millpond.engine.async_engine import AsyncEngine
from millpond.serve.app import create_app
from millpond.serve.run import Running, serve
from tiny_engine import BOUND_SECONDS, FakeClock, GatedRunner, make_engine, run

NOW = 1_700_000_000
NOTHING_FOUND = {"prompt_tokens_details": {"cached_tokens": 0}}


def with_server_config(settings):
    """The settings of ServerConfig among these, made into one."""
    names = {each.name for each in fields(ServerConfig)}
    own = {name: value for name, value in settings.items() if name in names}
    return {"config": ServerConfig(**own), **{name: settings[name] for name in settings.keys() - own.keys()}}


def app_over(engine, async_engine, **settings):
    """Answers are numbered: chatcmpl-0, or cmpl-0-0 for the first prompt of a completion, and so on.

    settings are those of ServerConfig or of create_app.
    """
    numbers = itertools.count()
    return create_app(
        async_engine,
        **{
            "model_names": ("tiny", "alias"),
            "tokenizer": engine.tokenizer,
            "chat_template": engine.chat_template,
            "now": lambda: NOW,
            "new_id": lambda: str(next(numbers)),
            **with_server_config(settings),
        },
    )


@contextlib.asynccontextmanager
async def started(
    engine, load=None, clock=time.monotonic, **settings
) -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    async_engine = AsyncEngine(engine, load, clock)
    async_engine.start()
    app = app_over(engine, async_engine, **settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield async_engine, client
    finally:
        await async_engine.shutdown()


def ask(engine, path, body=None, *, method=None, **settings):
    """One request to a fresh server; body None is a GET."""

    async def once():
        async with started(engine, **settings) as (_, client):
            if isinstance(body, str | bytes):
                headers = {"Content-Type": "application/json"}
                return await client.request(method or "POST", path, content=body, headers=headers)
            return await client.request(method or ("GET" if body is None else "POST"), path, json=body)

    return run(once())


def events_of(response):
    """The data of each event, as text."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    blocks = response.text.split("\n\n")[:-1]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def chunks_of(response):
    """The chunks of a stream that ended well."""
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def named_events_of(response):
    """The objects of a stream whose events are named by their types, and which has no other end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    payloads = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {payloads[-1]['type']}"
    return payloads


class HandDriven:
    """One POST to an ASGI application whose client the test holds: what it was sent, and when it hangs up."""

    def __init__(self, app, path, body) -> None:
        self._body = json.dumps(body).encode()
        self._hung_up = asyncio.Event()
        self._body_read = False
        self.sent = asyncio.Queue()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(app(self.scope, self._receive, self._send))

    async def _send(self, message):
        await self.sent.put(message)

    async def _receive(self):
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def hang_up(self):
        """Returns when the application is done with the request."""
        self._hung_up.set()
        await self.task


@contextlib.contextmanager
def listening(engine, **settings) -> Iterator[Running]:
    """A real server on a free loopback port, stopped at the end."""
    ready: queue.Queue[Running] = queue.Queue()
    lines: list[str] = []
    thread = threading.Thread(
        target=serve,
        args=(engine, "127.0.0.1", 0),
        kwargs={"on_ready": ready.put, "notify": lines.append, **with_server_config(settings)},
    )
    thread.start()
    running = ready.get(timeout=BOUND_SECONDS)
    try:
        yield running
    finally:
        running.stop()
        thread.join(BOUND_SECONDS)
        assert not thread.is_alive(), "the server did not stop"


def with_gate(test, *, load=None, clock=None, **settings):
    """Run test(client, async_engine, runner) over an engine whose steps it lets through; returns the engine."""
    engine = make_engine(wrap=GatedRunner, **settings)

    async def started_():
        async with started(engine, load, clock or FakeClock()) as (async_engine, client):
            try:
                await test(client, async_engine, engine.runner)
            finally:
                engine.runner.open_for_good()

    run(started_())
    assert engine.scheduler.requests == {}
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return engine


def turned_away(async_engine):
    return {why: count for why, count in async_engine.metrics.turned_away.items() if count}


async def until(condition):
    while not condition():
        await asyncio.sleep(0)
