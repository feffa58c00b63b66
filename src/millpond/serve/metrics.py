"""GET /metrics: an engine's numbers in the text format of Prometheus, by vLLM's names where they mean the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from millpond.core.disk_prefixes import DiskCounters
from millpond.engine.metrics import EngineMetrics, Histogram
from millpond.serve.errors import described
from millpond.version import __version__

Reading = Callable[[EngineMetrics], float]

GAUGES: tuple[tuple[str, str, Reading], ...] = (
    ("vllm:num_requests_running", "Requests that hold a slot.", lambda it: it.scheduler.num_running),
    (
        "vllm:num_requests_waiting",
        "Requests that wait for a slot and blocks.",
        lambda it: it.scheduler.num_waiting + it.num_queued,
    ),
    ("vllm:kv_cache_usage_perc", "Share of the K/V blocks in use; 1 is all.", lambda it: _usage(it)),
    ("millpond_kv_blocks", "Blocks of the K/V pool.", lambda it: it.scheduler.pool.num_blocks),
    ("millpond_disk_bytes", "Bytes of the folder of prefixes.", lambda it: _disk(it).stored_bytes),
    (
        "millpond_watermark_blocks",
        "Blocks held back from newcomers, as chosen last.",
        lambda it: it.scheduler.watermark_blocks,
    ),
)

COUNTERS: tuple[tuple[str, str, Reading], ...] = (
    (
        "vllm:num_preemptions_total",
        "Requests that gave their blocks back to be computed again.",
        lambda it: it.scheduler.counters.preemptions,
    ),
    (
        "millpond_displaced_total",
        "Of these, those that made room for a request that the policy puts before them.",
        lambda it: it.scheduler.counters.displaced,
    ),
    (
        "vllm:prefix_cache_queries_total",
        "Prompt tokens of new requests that were looked up in the prefix cache.",
        lambda it: it.scheduler.counters.queried_tokens,
    ),
    (
        "vllm:prefix_cache_hits_total",
        "Prompt tokens of new requests that were found in the prefix cache.",
        lambda it: it.scheduler.counters.hit_tokens,
    ),
    (
        "millpond_resumed_hit_tokens_total",
        "Positions of preempted requests that were found in the prefix cache instead of computed again.",
        lambda it: it.scheduler.counters.resumed_hit_tokens,
    ),
    (
        "millpond_disk_hit_tokens_total",
        "Those of both that came from disk.",
        lambda it: it.scheduler.counters.disk_hit_tokens,
    ),
    ("millpond_disk_read_bytes_total", "Read from the folder of prefixes.", lambda it: _disk(it).read_bytes),
    ("millpond_disk_written_bytes_total", "Written to the folder of prefixes.", lambda it: _disk(it).written_bytes),
    (
        "millpond_disk_damaged_blocks_total",
        "Files of the folder of prefixes that were not what they should be.",
        lambda it: _disk(it).damaged_blocks,
    ),
    (
        "millpond_disk_failed_writes_total",
        "Blocks that the disk did not take.",
        lambda it: _disk(it).failed_writes,
    ),
    (
        "millpond_disk_evicted_blocks_total",
        "Files that were deleted to make room for others.",
        lambda it: _disk(it).evicted_blocks,
    ),
    ("vllm:prompt_tokens_total", "Prompt tokens of requests that have their first token.", lambda it: it.prompt_tokens),
    ("vllm:generation_tokens_total", "Tokens generated.", lambda it: it.generation_tokens),
    (
        "vllm:spec_decode_num_draft_tokens_total",
        "Guesses of tokens to come that were tried.",
        lambda it: it.scheduler.counters.drafted_tokens,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_total",
        "Guesses that turned out to be right.",
        lambda it: it.scheduler.counters.accepted_tokens,
    ),
    ("millpond_steps_total", "Steps.", lambda it: it.num_steps),
    (
        "millpond_forward_tokens_total",
        "Positions forwarded: prompts, tokens, guesses, and what is computed again.",
        lambda it: it.scheduler.counters.forward_tokens,
    ),
    (
        "millpond_recomputed_tokens_total",
        "Positions forwarded again after a preemption.",
        lambda it: it.scheduler.counters.recomputed_tokens,
    ),
    (
        "millpond_thrashed_admissions_total",
        "Preemptions of a request that had not filled the block its admission bought.",
        lambda it: it.scheduler.counters.thrashed_admissions,
    ),
    (
        "millpond_watermark_delays_total",
        "Steps in which the watermark alone kept the next request waiting.",
        lambda it: it.scheduler.counters.watermark_delays,
    ),
    ("millpond_audits_total", "Steps after which every rule of the scheduler was checked.", lambda it: it.num_audits),
)

HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineMetrics], Histogram]], ...] = (
    (
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        lambda it: it.time_to_first_token,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Between two steps that gave a request tokens.",
        lambda it: it.inter_token_latency,
    ),
    (
        "vllm:time_per_output_token_seconds",
        "vllm:inter_token_latency_seconds by its former name.",
        lambda it: it.inter_token_latency,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "A request's mean time per token after its first.",
        lambda it: it.time_per_output_token,
    ),
    ("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", lambda it: it.e2e_latency),
    ("vllm:request_queue_time_seconds", "From arrival to the first admission.", lambda it: it.queue_time),
    ("vllm:request_prefill_time_seconds", "From the first admission to the first token.", lambda it: it.prefill_time),
    ("vllm:request_decode_time_seconds", "From the first token to the last.", lambda it: it.decode_time),
    ("vllm:request_prompt_tokens", "Prompt tokens of a request.", lambda it: it.request_prompt_tokens),
    ("vllm:request_generation_tokens", "Tokens that a request got.", lambda it: it.request_generation_tokens),
    ("vllm:iteration_tokens_total", "Positions forwarded in a step.", lambda it: it.step_tokens),
    ("millpond_step_seconds", "The whole of a step.", lambda it: it.step_seconds),
)


class EngineCollector(Collector):
    """Every family of /metrics. Its labels have values from here or from the server's own settings alone."""

    def __init__(self, metrics: EngineMetrics, model_name: str, responses: Counter[tuple[str, int]]) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._responses = responses

    def collect(self) -> Iterator[Metric]:
        model, labels = [self._model_name], ["model_name"]
        for name, text, reading in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(model, reading(self._metrics))
            yield gauge
        for name, text, reading in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(model, reading(self._metrics))
            yield counter
        for name, text, histogram_of in HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=labels)
            histogram = histogram_of(self._metrics)
            family.add_metric(model, _cumulative(histogram), histogram.total)
            yield family
        yield from self._by_label()

    def _by_label(self) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that have ended, by how.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._metrics.finished.items():
            finished.add_metric([self._model_name, reason.value], count)
        yield finished
        phases = CounterMetricFamily(
            "millpond_step_phase_seconds", "Where the time of steps went.", labels=["model_name", "phase"]
        )
        for phase, seconds in self._metrics.phase_seconds.items():
            phases.add_metric([self._model_name, phase], seconds)
        yield phases
        turned_away = CounterMetricFamily(
            "millpond_turned_away",
            "Calls that were refused or ended for want of room, of time or of a reader.",
            labels=["model_name", "reason"],
        )
        for why, count in self._metrics.turned_away.items():
            turned_away.add_metric([self._model_name, why], count)
        yield turned_away
        responses = CounterMetricFamily(
            "millpond_http_responses", "Answers over HTTP, by route and status.", labels=["route", "status"]
        )
        for (route, status), count in sorted(self._responses.items()):
            responses.add_metric([route, str(status)], count)
        yield responses
        yield InfoMetricFamily("millpond", "This server.", value={"version": __version__})


def metrics_router(collector: Collector) -> APIRouter:
    router = APIRouter()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)

    @router.get("/metrics", response_class=Response, responses={**described(401), 200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


NO_DISK = DiskCounters()


def _disk(metrics: EngineMetrics) -> DiskCounters:
    disk = metrics.scheduler.disk
    return NO_DISK if disk is None else disk.counters


def _usage(metrics: EngineMetrics) -> float:
    pool = metrics.scheduler.pool
    return 1.0 - pool.num_free / pool.num_blocks


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    names = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    # One look at the counts: the engine's thread goes on meanwhile.
    return list(zip(names, accumulate(list(histogram.counts)), strict=True))
