"""The server in a process of its own: a tiny model on the real kernels, faults on demand, and a look inside."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from millpond.build import build_engine
from millpond.config import EngineConfig, LoadLimits, ServerConfig
from millpond.core.step import RequestFault, Runner, SchedulerOutput, StepResult
from millpond.engine.async_engine import AsyncEngine
from millpond.engine.engine import Engine
from millpond.serve.request_log import current_request_id
from millpond.serve.run import Running, serve

INJECTED = "a fault that was planted"
OWN_TASKS = ("_serve", "Inside._in_loop")
BYTES_TO_SEND = 4096  # a server's send buffer, so that a slow reader is felt before megabytes have gone


@dataclass(frozen=True, slots=True)
class Setup:
    """seed is that of the faults. load and sizes are small, so that everything is short all the time."""

    path: Path
    seed: int
    sizes: dict[str, Any]
    load: LoadLimits
    max_body_bytes: int


class FaultyRunner:
    """Raises before or after a step, or spoils one request of it, by a seeded draw for each step; once it is armed."""

    def __init__(self, inner: Runner, seed: int) -> None:
        self.inner = inner
        self.share = 0.0
        self.planted = {"before": 0, "after": 0, "one": 0}
        self._draw = random.Random(seed)

    def execute(self, output: SchedulerOutput) -> StepResult:
        kind = self._draw.choice(list(self.planted)) if self._draw.random() < self.share else None
        if kind is not None:
            self.planted[kind] += 1
        if kind == "before":
            raise RuntimeError(INJECTED)
        result = self.inner.execute(output)
        if kind == "after":
            raise MemoryError(INJECTED)
        if kind == "one" and result.sampled:
            spoiled, *others = result.sampled
            fault = RequestFault(spoiled.request_id, INJECTED)
            scores = tuple(each for each in result.scores if each.request_id != spoiled.request_id)
            return StepResult(tuple(others), (*result.faults, fault), result.times, scores)
        return result


class AccessLedger(logging.Handler):
    """The access log as pairs of request id and status."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str | None, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((current_request_id(), record.fields["status"]))

    def take(self) -> list[tuple[str | None, int]]:
        lines, self.lines = self.lines, []
        return lines


class ErrorLedger(logging.Handler):
    """Errors in the log that nobody planted, and how many slow readers were ended."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.num_slow_readers = 0

    def emit(self, record: logging.LogRecord) -> None:
        cause, message = record.exc_info[1] if record.exc_info else None, record.getMessage()
        self.num_slow_readers += "outputs unread" in message
        if record.levelno >= logging.ERROR and INJECTED not in str(cause):
            self.lines.append(f"{message}: {cause!r}")


def main(pipe: Connection, setup: Setup) -> None:
    """Serve until told to stop. On the pipe: the address, then answers to what is asked."""
    access, errors = AccessLedger(), ErrorLedger()
    log = logging.getLogger("millpond.access")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(access)
    logging.getLogger().addHandler(errors)
    engine = build_engine(str(setup.path), EngineConfig(audit=True, threads=1, **setup.sizes))
    engine.runner = FaultyRunner(engine.runner, setup.seed)

    def on_ready(running: Running) -> None:
        server = running.stop.__self__
        for each in server.servers[0].sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BYTES_TO_SEND)
        host, port = running.url.removeprefix("http://").split(":")
        pipe.send((host, int(port)))
        inside = Inside(engine, server, access, errors)
        threading.Thread(target=inside.answer, args=(pipe, running), daemon=True).start()

    config = ServerConfig(max_body_bytes=setup.max_body_bytes, drain_timeout=5.0)
    serve(engine, "127.0.0.1", 0, config, load=setup.load, notify=lambda line: None, on_ready=on_ready)
    pipe.send("stopped")


class Inside:
    """Answers to the test, from a thread of its own."""

    def __init__(self, engine: Engine, server: Any, access: AccessLedger, errors: ErrorLedger) -> None:
        self.engine, self.server, self.access, self.errors = engine, server, access, errors
        self.async_engine: AsyncEngine = engine.observer.__self__
        self.loop = self.async_engine._loop

    def answer(self, pipe: Connection, running: Running) -> None:
        while (asked := pipe.recv()) != "stop":
            if isinstance(asked, float):
                self.engine.runner.share = asked
                pipe.send(None)
            else:
                looking = asyncio.run_coroutine_threadsafe(self._in_loop(asked), self.loop)
                pipe.send(looking.result(60.0))
        running.stop()

    async def _in_loop(self, asked: str) -> Any:
        return getattr(self, asked)()

    def sample(self) -> dict[str, Any]:
        """Memory in bytes, and the access log since the last time."""
        return {"rss": resident_bytes(), "access": self.access.take()}

    def figures(self) -> dict[str, Any]:
        engine, scheduler = self.engine, self.engine.scheduler
        metrics = self.async_engine.metrics
        return {
            "steps": metrics.num_steps,
            "audits": metrics.num_audits,
            "preemptions": scheduler.counters.preemptions,
            "hit_tokens": scheduler.counters.hit_tokens,
            "planted": dict(engine.runner.planted),
            "arrivals": scheduler._num_arrivals,
            "finished": {reason.value: count for reason, count in metrics.finished.items()},
            "errors": list(self.errors.lines),
            "slow_readers": self.errors.num_slow_readers,
        }

    def leftovers(self) -> dict[str, Any]:
        """Everything that should be empty when nobody asks for anything, less what is; the names say where."""
        engine, async_engine = self.engine, self.async_engine
        scheduler, room, inner = engine.scheduler, async_engine._room, engine.runner.inner
        pool, state = scheduler.pool, self.server.server_state
        everything = {
            "held blocks": pool.num_blocks - pool.num_free,
            "references to blocks": sum(map(pool.ref_count, range(pool.num_blocks))),
            "held slots": scheduler.max_num_seqs - len(set(scheduler.free_slots)),
            "scheduler": [*scheduler.requests, *scheduler.waiting, *scheduler.running, *scheduler.finished],
            "step in flight": [each.request_id for each, _ in scheduler._in_flight],
            "auditor": list(engine._auditor._records),
            "engine": list(engine._answers),
            "seated": list(engine._seated - {*engine._unheard}),
            "async engine": list(async_engine._calls),
            "inbox": list(async_engine._inbox),
            "waiting room": [*room._waiting, *room._inside],
            "waiting tokens": room.num_waiting_tokens,
            "deadlines": len(async_engine._deadlines),
            "metrics": list(async_engine.metrics._requests),
            "timelines": [each.request_id for each in async_engine.timelines.unfinished],
            "runner": [name for name, _ in inner._special.values() if name not in engine._unheard],
            "masks": list(inner.sampler._masks.keys() - inner._special),
            "scores": [*inner.sampler._num_top.keys() - inner._special, *inner.sampler._raw_rows],
            "prompts": list(inner._prompts._prompts.keys() - inner._special),
            "handlers": len(state.tasks),
            "tasks": [name for task in asyncio.all_tasks() if (name := task.get_coro().__qualname__) not in OWN_TASKS],
        }
        return {name: found for name, found in everything.items() if found}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
