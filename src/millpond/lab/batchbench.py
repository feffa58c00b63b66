"""What the batch does, counted on the real scheduler: the reserve swept, and static against continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from millpond.config import AUTO
from millpond.core.block_pool import blocks_for_length
from millpond.core.door import Door
from millpond.core.invariants import Auditor
from millpond.core.request import FinishReason, Request
from millpond.core.reserve import make_reserve
from millpond.core.sampling import SamplingParams
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import FIXED_ROWS
from millpond.core.step import Clock, Runner, ScheduledRequest
from millpond.errors import ConfigError, EngineError
from millpond.lab.batch_run import BatchRun, BatchStep, Row, Share
from millpond.lab.stepping import NO_LIMIT, ChecksumRunner, StepLoop
from millpond.lab.workload import WorkloadRequest, check_door

ReserveChoice = int | Literal["auto"]  # in blocks, or what core/reserve.py makes of the requests

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def _no_notice(name: str) -> None:
    """For callers that show no progress."""


# The watermark sweep.


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkPoint:
    """One workload under one reserve: the scheduler's counters once it has drained, and how many requests completed."""

    watermark_blocks: ReserveChoice
    preemptions: int
    thrashed_admissions: int
    admissions: int
    iterations: int
    forward_tokens: int
    recomputed_tokens: int
    recompute_share: float
    completed: int

    @property
    def work(self) -> int:
        """The price of the run in rows: a step costs about as much as its rows and FIXED_ROWS more."""
        return self.forward_tokens + FIXED_ROWS * self.iterations

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkSweep:
    """What every reserve is tried on. step_seconds is how long a step takes on the clock of the requests' arrivals."""

    requests: Sequence[WorkloadRequest]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int | None = None
    step_seconds: float = 0.05
    audit: bool = False

    @property
    def most_iterations(self) -> int:
        """More than any run needs: each step moves the oldest request on by a token, or is one that only releases."""
        return sum(len(each.prompt_token_ids) + each.max_tokens + 1 for each in self.requests)

    def check(self, reserves: Sequence[ReserveChoice]) -> None:
        """Raise ConfigError for what cannot be swept, naming the command's options."""
        if not reserves:
            raise ConfigError("there is no reserve to sweep: name at least one (--reserves 0,1,2)")
        if not self.requests:
            raise ConfigError("there is no request to sweep with (--requests, --trace)")
        if not 0 < self.step_seconds < inf:
            raise ConfigError(f"a step must take more than 0 seconds (--step-seconds), got {self.step_seconds:g}")
        for reserve in reserves:
            if (times := reserves.count(reserve)) > 1:
                raise ConfigError(f"the reserve {reserve} is named {times} times (--reserves): name it once")
            if not isinstance(reserve, str) and not 0 <= reserve < self.num_blocks:
                raise ConfigError(
                    f"a reserve of {reserve} blocks (--reserves) cannot be held by a pool of {self.num_blocks} "
                    f"(--blocks): name reserves from 0 to {self.num_blocks - 1}"
                )
        check_door(self.requests, Door(self.num_blocks, self.block_size, NO_LIMIT))


def sweep_watermarks(
    sweep: WatermarkSweep,
    reserves: Sequence[ReserveChoice],
    notify: Callable[[str], None] = _no_notice,
    scheduler_class: type[Scheduler] = Scheduler,
) -> list[WatermarkPoint]:
    """Run the workload once for each reserve, in blocks or "auto"; notify gets each one's name before it starts.

    Raises ConfigError for what cannot be swept, EngineError where a run does not end.
    """
    sweep.check(reserves)
    points = []
    for reserve in reserves:
        notify(f"reserve {reserve}")
        points.append(_drain(sweep, reserve, scheduler_class))
    return points


def _drain(sweep: WatermarkSweep, reserve: ReserveChoice, scheduler_class: type[Scheduler]) -> WatermarkPoint:
    scheduler = scheduler_class(
        num_blocks=sweep.num_blocks,
        block_size=sweep.block_size,
        max_num_seqs=sweep.max_num_seqs,
        max_num_batched_tokens=sweep.max_num_batched_tokens,
        max_model_len=NO_LIMIT,
        reserve=make_reserve(sweep.num_blocks, sweep.block_size, AUTO, None if isinstance(reserve, str) else reserve),
    )
    loop = StepLoop(scheduler, ChecksumRunner(), Auditor(scheduler) if sweep.audit else None)
    coming = deque(enumerate(sorted(sweep.requests, key=lambda each: each.arrival)))
    completed, now = 0, 0.0
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[0][1].arrival)
        while coming and coming[0][1].arrival <= now:
            index, each = coming.popleft()
            scheduler.add_request(Request(f"r{index}", each.prompt_token_ids, each.max_tokens))
        _, updates = loop.step()
        completed += sum(update.request.finish_reason is FinishReason.LENGTH for update in updates)
        now += sweep.step_seconds
        if scheduler.counters.iterations > sweep.most_iterations:
            raise EngineError(
                f"reserve {reserve} does not drain: {completed} of {len(sweep.requests)} requests are completed after "
                f"{sweep.most_iterations} iterations, the most they could need; this is a bug"
            )
    counters = scheduler.counters
    return WatermarkPoint(
        watermark_blocks=reserve,
        preemptions=counters.preemptions,
        thrashed_admissions=counters.thrashed_admissions,
        admissions=counters.admissions,
        iterations=counters.iterations,
        forward_tokens=counters.forward_tokens,
        recomputed_tokens=counters.recomputed_tokens,
        recompute_share=counters.recompute_share,
        completed=completed,
    )


def choose_reserve(points: Sequence[WatermarkPoint]) -> tuple[WatermarkPoint, str]:
    """The reserve whose run is the least work, the smallest of equals; and why, in a sentence."""
    base = min(points, key=_place)
    best = min(points, key=lambda point: (point.work, _place(point)))
    others = [point for point in points if point is not best]
    name, start = f"reserve {best.watermark_blocks}", f"reserve {base.watermark_blocks}"
    if not others:
        return best, f"{name}: the only one that was tried."
    if not base.preemptions:
        return best, f"{name}: nothing is preempted, so a larger reserve could only make requests wait."
    price = f"(positions forwarded, and {FIXED_ROWS} for each iteration)"
    if best is base:
        next_best = min(others, key=lambda point: (point.work, _place(point)))
        return best, (
            f"{name}: a brake costs more than it saves. Reserve {next_best.watermark_blocks}, the next best, "
            f"{_trade(base, next_best)}: {next_best.work} units of work, not {base.work} {price}."
        )
    saved = (base.work - best.work) / base.work
    return best, f"{name}: against {start} it {_trade(base, best)}, {saved:.1%} less work in all {price}."


def _place(point: WatermarkPoint) -> float:
    """Reserves in their order, auto behind all that are fixed."""
    return inf if isinstance(point.watermark_blocks, str) else point.watermark_blocks


def _trade(base: WatermarkPoint, other: WatermarkPoint) -> str:
    """What another reserve changes, as in "has 4 fewer preemptions, forwards ... and takes 3 more iterations"."""
    return (
        f"has {_difference(other.preemptions - base.preemptions, 'preemption')}, "
        f"forwards {_difference(other.forward_tokens - base.forward_tokens, 'position')} "
        f"and takes {_difference(other.iterations - base.iterations, 'iteration')}"
    )


def _difference(count: int, what: str) -> str:
    if not count:
        return f"as many {what}s"
    return f"{abs(count)} {'more' if count > 0 else 'fewer'} {what}{'s' * (abs(count) > 1)}"


# Static against continuous batching.


@dataclass(slots=True)
class BatchBench:
    """Both policies over one workload that is all there at the start, on one idle scheduler and its runner.

    Static: in order of arrival, as many requests as there are slots and as the pool holds to their ends; each row
    runs until the longest is done, and then all answers are delivered. Prompts are not padded.
    """

    scheduler: Scheduler
    runner: Runner
    clock: Clock
    requests: Sequence[WorkloadRequest]
    _num_runs: int = 0

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError("there is no request to batch (--requests)")
        if late := [each.arrival for each in self.requests if each.arrival]:
            raise ConfigError(f"batching is compared with all requests there at 0 seconds, one comes at {late[0]:g}")
        check_door(self.requests, self.scheduler.door)

    def compare(
        self, rounds: int = 1, *, warm_up: bool = False, notify: Callable[[str], None] = _no_notice
    ) -> tuple[BatchRun, BatchRun]:
        """The static and the continuous run, in turns; of several rounds each one's of median duration.

        notify gets each run's name before it starts. Raises EngineError where the policies gave different tokens.
        """
        if rounds < 1:
            raise ConfigError(f"rounds must be at least 1 (--rounds), got {rounds}")
        static, continuous = [], []
        for turn in range(-int(warm_up), rounds):
            name = "warm-up" if turn < 0 else f"round {turn + 1}"
            notify(f"static, {name}")
            static.append(self.static())
            notify(f"continuous, {name}")
            continuous.append(self.continuous())
            self._check_same(static[-1], continuous[-1])
        return _median_run(static[-rounds:]), _median_run(continuous[-rounds:])

    def static(self) -> BatchRun:
        return self._run(list(self.static_batches()), holds_answers=True)

    def continuous(self) -> BatchRun:
        return self._run([range(len(self.requests))], holds_answers=False)

    def static_batches(self) -> Iterator[list[int]]:
        """The requests in order, cut where the slots or the pool end."""
        batch: list[int] = []
        for index in range(len(self.requests)):
            if batch and not self._fits([*batch, index]):
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def _fits(self, batch: Sequence[int]) -> bool:
        longest = max(self.requests[index].max_tokens for index in batch)
        prompts = [len(self.requests[index].prompt_token_ids) for index in batch]
        door, block_size = self.scheduler.door, self.scheduler.block_size
        blocks = sum(blocks_for_length(prompt + longest - 1, block_size) for prompt in prompts)
        return (
            len(batch) <= self.scheduler.max_num_seqs
            and blocks <= self.scheduler.pool.num_blocks
            and all(longest <= door.max_tokens_that_fit(prompt) for prompt in prompts)
        )

    def _run(self, batches: Sequence[Sequence[int]], *, holds_answers: bool) -> BatchRun:
        """Batch after batch, each once all of the one before has ended; the next step releases and admits at once."""
        self._num_runs += 1
        scheduler, loop = self.scheduler, StepLoop(self.scheduler, self.runner)
        run = BatchRun(self.requests, batches, holds_answers)
        tokens: dict[int, list[int]] = {index: [] for index in range(len(self.requests))}
        furthest = dict.fromkeys(tokens, 0)
        before = scheduler.counters.preemptions
        for batch in batches:
            longest = max(self.requests[index].max_tokens for index in batch)
            for index in batch:
                each = self.requests[index]
                max_tokens = longest if holds_answers else each.max_tokens
                name = f"batch-{self._num_runs}-{index}"
                scheduler.add_request(Request(name, each.prompt_token_ids, max_tokens, GREEDY))
            while scheduler.num_running or scheduler.num_waiting:
                start = self.clock()
                output, updates = loop.step()
                end = self.clock()
                shares = tuple(self._share(each, furthest) for each in output.scheduled)
                run.steps.append(BatchStep(start, end, shares))
                for update in updates:
                    if update.fault is not None:
                        raise EngineError(f"request {update.request.request_id}: {update.fault}")
                    tokens[_index(update.request.request_id)] += update.token_ids
        scheduler.release_finished()
        run.outputs = [tokens[index][: each.max_tokens] for index, each in enumerate(self.requests)]
        run.preemptions = scheduler.counters.preemptions - before
        return run

    def _share(self, each: ScheduledRequest, furthest: dict[int, int]) -> Share:
        """What a request's share of a step was for; furthest is how far each request was ever forwarded."""
        index = _index(each.request_id)
        request, before = self.requests[index], furthest[index]
        prompt = len(request.prompt_token_ids)
        needed = prompt + request.max_tokens - 1
        end = each.first_position + len(each.token_ids)
        furthest[index] = max(before, end)
        if each.first_position >= needed:
            kind = Row.DEAD
        elif each.first_position < before:
            kind = Row.RECOMPUTE
        else:
            kind = Row.PREFILL if before < prompt else Row.DECODE
        return Share(index, kind, len(each.token_ids), max(0, min(end, needed) - before))

    def _check_same(self, static: BatchRun, continuous: BatchRun) -> None:
        for index, (one, other) in enumerate(zip(static.outputs, continuous.outputs, strict=True)):
            asked = self.requests[index].max_tokens
            if one != other or len(one) != asked:
                raise EngineError(
                    f"request {index + 1} asked for {asked} tokens: {len(one)} in a static batch and {len(other)} in "
                    f"continuous ones, which should be the same; this is a bug"
                )


def _index(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])


def _median_run(runs: Sequence[BatchRun]) -> BatchRun:
    return sorted(runs, key=lambda run: run.duration)[(len(runs) - 1) // 2]


def report_of(bench: BatchBench, static: BatchRun, continuous: BatchRun, unit: str) -> dict[str, Any]:
    """Both runs and the workload that they were of, as `bench batching --json` prints them."""
    return {
        "unit": unit,
        "slots": bench.scheduler.max_num_seqs,
        "num_blocks": bench.scheduler.pool.num_blocks,
        "block_size": bench.scheduler.block_size,
        "workload": [
            {"prompt_tokens": len(each.prompt_token_ids), "output_tokens": each.max_tokens} for each in bench.requests
        ],
        "same_tokens": static.outputs == continuous.outputs,
        "static": static.as_json(unit),
        "continuous": continuous.as_json(unit),
    }
