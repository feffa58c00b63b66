"""A running engine as the harness sees it, offline or as a server. Figures come back as plain dictionaries."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.peers import client
from bench.peers.processes import EngineFailure, EngineProcess, peak_bytes
from bench.peers.site import ROOT, Site
from millpond.lab.workload import WorkloadRequest

READY_SECONDS = 900.0  # an engine that compiles at its first start takes minutes
ANSWER_SECONDS = 600.0
POLL_SECONDS = 0.01

Sample = dict[str, Any]


class NotMeasurableError(Exception):
    """This engine has no interface for that; the text says which and why. Not a failure."""


class Session(Protocol):
    """One engine that can be measured offline."""

    settings: Mapping[str, Any]

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int) -> Sample: ...
    def batch(self, requests: Sequence[WorkloadRequest]) -> Sample: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def peak_bytes(self) -> int: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class WorkerSession:
    """A worker script inside the engine's environment, talked to in JSON lines."""

    name: str
    process: EngineProcess
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def start(
        cls, site: Site, name: str, engine: str, settings: Mapping[str, Any], environment: Mapping[str, str]
    ) -> WorkerSession:
        """Start it and wait until it is ready. Raises EngineFailure with the end of its log."""
        command = [site.python(engine), "-m", f"bench.peers.workers.{engine}", json.dumps(settings)]
        process = EngineProcess.start(
            name,
            command,
            log=site.log(f"{name}-worker"),
            cores=site.cores,
            environment=environment,
            folder=ROOT,
            pipes=True,
        )
        session = cls(name, process)
        try:
            ready = session._read(READY_SECONDS)
            session.settings = {"command": command, "environment": dict(environment), "told": ready["settings"]}
        except BaseException:
            process.stop()
            raise
        return session

    def _read(self, seconds: float) -> dict[str, Any]:
        output = self.process.popen.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], seconds)
        if not ready:
            raise self.process.failure(f"no answer in {seconds:.0f} s")
        line = output.readline()
        if not line:
            raise self.process.failure("the worker ended")
        return json.loads(line)

    def _ask(self, command: Mapping[str, Any]) -> Sample:
        to_worker = self.process.popen.stdin
        assert to_worker is not None
        try:
            to_worker.write(json.dumps(command) + "\n")
            to_worker.flush()
        except BrokenPipeError:
            raise self.process.failure("the worker ended") from None
        reply = self._read(ANSWER_SECONDS)
        if "error" in reply:
            raise EngineFailure(f"{self.name}: {reply['error']}")
        return reply["ok"]

    def decode(self, prompts: Sequence[Sequence[int]], num_steps: int) -> Sample:
        return self._ask({"op": "decode", "prompts": [list(prompt) for prompt in prompts], "steps": num_steps})

    def batch(self, requests: Sequence[WorkloadRequest]) -> Sample:
        return self._ask({"op": "batch", "requests": [[each.prompt_token_ids, each.max_tokens] for each in requests]})

    def pause(self) -> None:
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    def peak_bytes(self) -> int:
        return peak_bytes(self.process.popen.pid)

    def close(self) -> None:
        self.process.stop()


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How an engine's HTTP server is started and spoken to. {port} in the command stands for its port."""

    command: Sequence[str]
    environment: Mapping[str, str]
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((client.HOST, 0))
        return listener.getsockname()[1]


@dataclass(slots=True)
class ServerSession:
    """A server that has answered its first request. start_seconds is from its start to that answer's first token."""

    plan: ServerPlan
    process: EngineProcess
    port: int
    start_seconds: float

    @classmethod
    def start(
        cls,
        site: Site,
        name: str,
        plan: ServerPlan,
        first: WorkloadRequest,
        environment: Mapping[str, str] | None = None,
    ) -> ServerSession:
        """Start it and ask again and again until it answers. Raises EngineFailure with the end of its log."""
        port = free_port()
        begun = time.perf_counter()
        process = EngineProcess.start(
            name,
            [part.replace("{port}", str(port)) for part in plan.command],
            log=site.log(f"{name}-server"),
            cores=site.cores,
            environment={**plan.environment, **(environment or {})},
            folder=site.work,
        )
        session = cls(plan, process, port, 0.0)
        try:
            session._wait(first, begun)
        except BaseException:
            process.stop()
            raise
        session.start_seconds = time.perf_counter() - begun
        return session

    def _wait(self, first: WorkloadRequest, begun: float) -> None:
        while time.perf_counter() - begun < READY_SECONDS:
            if self.process.popen.poll() is not None:
                raise self.process.failure("the server ended before it answered")
            try:
                client.load(self.port, [first], self.plan.model, self.plan.extra, stream=True)
                return
            except OSError:
                time.sleep(POLL_SECONDS)
            except client.ServerAnswer as answer:
                # A server that is still loading says 503; anything else will not get better.
                if "503" not in str(answer):
                    raise self.process.failure(f"its first answer was {answer}") from None
                time.sleep(POLL_SECONDS)
        raise self.process.failure(f"no answer in {READY_SECONDS:.0f} s")

    @property
    def settings(self) -> Mapping[str, Any]:
        plan = self.plan
        return {"command": list(plan.command), "environment": dict(plan.environment), "told": dict(plan.extra)}

    def load(self, requests: Sequence[WorkloadRequest], *, stream: bool = True) -> Sample:
        """Send the requests when they are due and wait for all. Raises EngineFailure for the first that fails."""
        try:
            return client.load(self.port, requests, self.plan.model, self.plan.extra, stream=stream).as_sample()
        except (OSError, client.ServerAnswer) as error:
            raise self.process.failure(f"a request failed: {error}") from error
