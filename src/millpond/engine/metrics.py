"""What an engine has done, as numbers that cost a step next to nothing to keep; serve/metrics.py shows them.

The engine's thread writes, any thread may read: all that is read is one number or one list at a time. What the event
loop does, which is to queue and to turn away, it counts itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from millpond.core.request import FinishReason, Request
from millpond.core.scheduler import Scheduler
from millpond.core.step import StepStats
from millpond.engine.outputs import RequestOutput

# The buckets that vLLM's dashboards are drawn for, and finer ones for steps, which are shorter here than its smallest.
# fmt: off
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# fmt: on

PHASES = ("schedule", "arrays", "forward", "sample", "update")
TURNED_AWAY = (
    *("waiting_requests", "waiting_tokens", "queue_timeout", "request_timeout", "slow_reader"),
    *("deadline_unreachable", "deadline_waiting", "deadline_running"),
)


class Histogram:
    """Counts of values by bucket: counts[i] of those up to bounds[i] and above the one before; the last of the rest."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class RequestTimes(NamedTuple):
    """One request that has ended, in seconds of the engine's clock; None for what it never came to."""

    request_id: str
    arrived: float
    admitted: float | None
    first_token: float | None
    last_token: float | None
    ended: float
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int


class _Request:
    __slots__ = ("admitted", "arrived", "first_token", "last_token")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token = 0.0


class EngineMetrics:
    """Counters and histograms of one engine since its start.

    A request that the engine had before it had this is not counted. Latencies are of requests that ended with `stop`
    or `length`; others are counted by their reason alone. An inter-token latency is the time between two steps that
    gave a request tokens. num_queued requests were taken that the engine has not seen yet. turned_away counts calls
    that were refused or ended for want of room, of time or of a reader. on_end, where it is set, is called in the
    engine's thread with each request that has ended.
    """

    def __init__(self, scheduler: Scheduler, on_end: Callable[[RequestTimes], None] | None = None) -> None:
        self.scheduler = scheduler
        self.on_end = on_end
        self.num_steps = 0
        self.num_audits = 0
        self.num_queued = 0
        self.turned_away = dict.fromkeys(TURNED_AWAY, 0)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.finished = dict.fromkeys(FinishReason, 0)
        self.step_seconds = Histogram(STEP_BUCKETS)
        self.step_tokens = Histogram(STEP_TOKEN_BUCKETS)
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_BUCKETS)
        self.time_per_output_token = Histogram(TOKEN_BUCKETS)
        self.e2e_latency = Histogram(REQUEST_BUCKETS)
        self.queue_time = Histogram(REQUEST_BUCKETS)
        self.prefill_time = Histogram(REQUEST_BUCKETS)
        self.decode_time = Histogram(REQUEST_BUCKETS)
        lengths = _one_two_five(scheduler.door.max_model_len)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self._requests: dict[str, _Request] = {}

    def add(self, request_id: str, arrived: float) -> None:
        """A request that the engine has taken."""
        self._requests[request_id] = _Request(arrived)

    def abort(self, request: Request, now: float) -> None:
        """A request that ends without an output."""
        counts = request.num_prompt_tokens, request.num_output_tokens
        self._end(request.request_id, FinishReason.ABORT, now, *counts)

    def step(
        self, stats: StepStats, admitted: Sequence[str], outputs: Sequence[RequestOutput], began: float, now: float
    ) -> None:
        """A step that began and ended at these times, whom it admitted and what it gave."""
        self.num_steps += 1
        self.num_audits += stats.audited
        phases, times = self.phase_seconds, stats.times
        phases["schedule"] += stats.schedule_seconds
        phases["arrays"] += times.arrays_seconds
        phases["forward"] += times.forward_seconds
        phases["sample"] += times.sample_seconds
        phases["update"] += stats.update_seconds + stats.text_seconds
        self.step_seconds.observe(now - began)
        self.step_tokens.observe(stats.num_tokens)
        for request_id in admitted:
            request = self._requests.get(request_id)
            if request is not None and request.admitted is None:
                request.admitted = began
        if outputs:
            self._outputs(outputs, now)

    def _outputs(self, outputs: Sequence[RequestOutput], now: float) -> None:
        requests, before, num_tokens = self._requests, [], 0
        ended = []
        for output in outputs:
            token_ids = output.new_token_ids
            if token_ids and (request := requests.get(output.request_id)) is not None:
                num_tokens += len(token_ids)
                if request.first_token is None:
                    request.first_token = now
                    self.prompt_tokens += output.num_prompt_tokens
                else:
                    before.append(request.last_token)
                request.last_token = now
            if output.finish_reason is not None:
                ended.append(output)
        self.generation_tokens += num_tokens
        # Nearly all of them had their last token in one step, the one before.
        for moment in set(before):
            self.inter_token_latency.observe(now - moment, before.count(moment))
        for request_id, _, _, reason, num_prompt_tokens, num_output_tokens, *_ in ended:
            assert reason is not None
            self._end(request_id, reason, now, num_prompt_tokens, num_output_tokens)

    def _end(self, request_id: str, reason: FinishReason, now: float, num_prompt: int, num_output: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.finished[reason] += 1
        first, admitted, last = request.first_token, request.admitted, request.last_token
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and first is not None and admitted is not None:
            self.time_to_first_token.observe(first - request.arrived)
            self.e2e_latency.observe(now - request.arrived)
            self.queue_time.observe(admitted - request.arrived)
            self.prefill_time.observe(first - admitted)
            self.decode_time.observe(last - first)
            if num_output > 1:
                self.time_per_output_token.observe((last - first) / (num_output - 1))
            self.request_prompt_tokens.observe(num_prompt)
            self.request_generation_tokens.observe(num_output)
        if self.on_end is not None:
            last_token = None if first is None else last
            self.on_end(
                RequestTimes(
                    request_id, request.arrived, admitted, first, last_token, now, reason, num_prompt, num_output
                )
            )


def _one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to most."""
    bounds = [step * 10**power for power in range(len(str(most))) for step in (1, 2, 5)]
    return [bound for bound in bounds if bound <= most]
