"""Carries out a plan: opens the engines of a phase, lets them run one at a time, writes down every sample."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bench.peers import workloads
from bench.peers.engines import Contender
from bench.peers.plan import Job, Measurement, Plan, jobs, measurements
from bench.peers.processes import EngineFailure, NoiseMeter, peak_bytes
from bench.peers.sessions import NotMeasurableError, Sample, ServerSession, Session
from bench.peers.site import Site
from bench.peers.store import RunStore, record_of
from millpond.lab.workload import WorkloadRequest

PHASES = ("offline", "prefix", "first-start", "server")
FIRST = WorkloadRequest(
    0.0, tuple(range(100, 116)), 1
)  # the request that a server is ready with: 16 tokens in, one out

T = TypeVar("T")
Tell = Callable[[str], None]


@dataclass(slots=True)
class Runner:
    """One run. tell gets a line for everything that happens, advance a call for every job that is over."""

    site: Site
    plan: Plan
    store: RunStore
    contenders: Mapping[str, Contender]
    tell: Tell
    advance: Callable[[], None]
    most_noise: float = 1.0  # what was measured with more of the cores taken by others is measured again
    _open: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Every phase that has something left to do. What fails is recorded and told, and the rest goes on."""
        for phase in PHASES:
            pending = list(self.pending(phase))
            if not pending:
                continue
            try:
                self._phase(phase, pending)
            finally:
                self._close()

    def pending(self, phase: str) -> Iterator[Job]:
        done = self.store.done(self.most_noise)
        some = [each for each in measurements(self.plan) if each.phase == phase]
        everything = list(jobs(some, tuple(self.contenders)))
        missing = {job.key for job in everything if job.counts and job.key not in done}
        # An engine that was started again has to warm up again for what is missing of it.
        warmed = {key[:2] for key in missing}
        return (job for job in everything if job.key in missing or (not job.counts and job.key[:2] in warmed))

    def _phase(self, phase: str, pending: Sequence[Job]) -> None:
        failed: dict[str, str] = {}
        # Starts come first, so that the server of the last one is warmed up for the rest and kept.
        for job in sorted(pending, key=lambda job: job.measurement.group != "startup"):
            name = job.contender
            if name not in failed:
                try:
                    self._job(phase, job)
                except EngineFailure as failure:
                    self.tell(f"[red]{failure}")
                    failed[name] = str(failure)
                    self._drop(name)
            if name in failed:
                self.store.add(record_of(job, error=failed[name]))
            self.advance()
        if phase == "offline":
            self._record_memory("memory/offline", lambda session: session.peak_bytes())

    def _job(self, phase: str, job: Job) -> None:
        began = time.time()
        try:
            sample, others = self._measured(phase, job)
        except NotMeasurableError as reason:
            self.store.add(record_of(job, absent=str(reason)))
            self.tell(f"{job.measurement.key}: {reason}")
            return
        self.store.add(
            record_of(job, sample=sample, others=round(others, 4), load=os.getloadavg()[0], at=round(began, 1))
        )
        self.tell(line_of(job, sample, others))

    def _measured(self, phase: str, job: Job) -> tuple[Sample, float]:
        noise = NoiseMeter(self.site.cores)
        if job.measurement.group in ("startup", "first-start"):
            self._drop(job.contender)
            noise.start()
            return self._start_up(job), noise.others_share()
        session = self._session(phase, job.contender)
        with self._running(session):
            noise.start()
            sample = measure(session, job.measurement, self.plan, job.round, self.site.vocab_size)
            others = noise.others_share()
        if job.measurement.key == "http/w1":
            self._memory_record("memory/server", job.contender, peak_bytes(session.process.popen.pid))
        return sample, others

    @contextmanager
    def _running(self, session: Any) -> Iterator[None]:
        pausable = session.process if isinstance(session, ServerSession) else session
        pausable.resume()
        try:
            yield
        finally:
            pausable.pause()

    def _session(self, phase: str, name: str) -> Any:
        """The contender's session, started at its first job and paused since its last."""
        if name not in self._open:
            if phase == "server":
                self._open[name] = self._server(name)
            else:
                self.tell(f"{name}: starting")
                contender = self.contenders[name]
                settings = contender.engine.variants[contender.variant]
                self._open[name] = contender.engine.open_offline(self.site, name, settings, phase == "prefix")
            # For the reader of the record: a round of 0 is no figure.
            line = {"key": f"session/{phase}", "contender": name, "round": 0}
            self.store.add(line | {"settings": dict(self._open[name].settings)})
        return self._open[name]

    def _server(self, name: str, environment: Mapping[str, str] | None = None) -> ServerSession:
        contender = self.contenders[name]
        if contender.engine.plan_server is None:
            raise NotMeasurableError(f"{name}: its package has no HTTP server")
        plan = contender.engine.plan_server(self.site, contender.engine.variants[contender.variant], False)
        self.tell(f"{name}: starting its server")
        return ServerSession.start(self.site, name, plan, FIRST, environment)

    def _start_up(self, job: Job) -> Sample:
        """Seconds until a server's first token; with empty caches of its own for the very first start."""
        if job.measurement.group == "startup":
            session = self._server(job.contender)
            session.process.pause()
            self._open[job.contender] = session
            return {"seconds": session.start_seconds}
        with tempfile.TemporaryDirectory(prefix="empty-cache-", dir=self.site.work) as empty:
            session = self._server(job.contender, cache_folders(empty))
            session.process.stop()
        return {"seconds": session.start_seconds}

    def _record_memory(self, key: str, read: Callable[[Session], int]) -> None:
        for name, session in self._open.items():
            self._memory_record(key, name, read(session))

    def _memory_record(self, key: str, name: str, num_bytes: int) -> None:
        self.store.add({"key": key, "contender": name, "round": 1, "sample": {"bytes": num_bytes}})

    def _drop(self, name: str) -> None:
        session = self._open.pop(name, None)
        if session is not None:
            (session.process.stop if isinstance(session, ServerSession) else session.close)()

    def _close(self) -> None:
        for name in list(self._open):
            self._drop(name)


def cache_folders(folder: str) -> dict[str, str]:
    """Where the engines keep what they compiled, all in an empty folder."""
    return {
        "XDG_CACHE_HOME": folder,
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torchinductor",
    }


def measure(session: Any, what: Measurement, plan: Plan, round_: int, vocab_size: int) -> Sample:
    """One sample. The same round of the same measurement is the same workload for every engine."""
    size = int(what.size)
    if what.group == "decode":
        prompts = workloads.decode_prompts(size, vocab_size, plan.seed, round_)
        return session.decode(prompts, workloads.DECODE_STEPS)
    if what.group == "prefill":
        request = workloads.prefill_request(size, vocab_size, plan.seed, round_)
        return session.batch([request]) | {"prompt_tokens": size}
    if what.group == "w1":
        return session.batch(workloads.w1_requests(vocab_size, plan.seed, round_)[: plan.most_requests])
    if what.group == "shared":
        return session.batch(workloads.shared_prefix_requests(vocab_size, plan.seed, round_)[: plan.most_requests])
    if what.group == "http":
        return session.load(workloads.w1_requests(vocab_size, plan.seed, round_)[: plan.most_requests])
    if what.group == "poisson":
        seconds = plan.poisson_seconds
        return session.load(workloads.poisson_requests(what.size, seconds, vocab_size, plan.seed, round_))
    raise ValueError(f"nothing measures {what.key!r}")


def line_of(job: Job, sample: Sample, others: float) -> str:
    """One line for a person who watches."""
    tokens = sample.get("prompt_tokens", sample.get("tokens"))
    figure = f"{tokens / sample['seconds']:.0f} tok/s" if tokens else f"{sample['seconds']:.1f} s"
    which = f"round {job.round}" if job.counts else "warm-up"
    noisy = f"  [yellow]others took {others:.0%} of the cores" if others > 0.05 else ""
    return f"{job.measurement.key:<16} {which:<8} {job.contender:<16} {figure}{noisy}"
