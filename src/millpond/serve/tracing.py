"""OpenTelemetry: a span for each request that has ended; below it the queue, prefill and decode."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from millpond.engine.metrics import RequestTimes
from millpond.errors import ConfigError
from millpond.version import __version__

# A collector that does not answer must not hold up the end of a server.
CLOSE_SECONDS = 2.0

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def check_tracing() -> None:
    """Raise ConfigError where OpenTelemetry is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError("traces need OpenTelemetry; install it with: pip install 'millpond[otel]'") from error


def otlp_provider(endpoint: str) -> TracerProvider:
    """A provider that sends spans over HTTP to a collector, in a thread of its own. Raises ConfigError, as above.

    endpoint is where it takes traces, such as http://127.0.0.1:4318/v1/traces.
    """
    check_tracing()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "millpond"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class RequestTracer:
    """Makes the spans of requests, afterwards, from their times; what is not known yet cannot slow a step."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("millpond", __version__)
        self._model_name = model_name
        # Steps are timed by a clock that only goes forward, spans by the time of day.
        self._offset = time.time_ns() - time.monotonic_ns()

    def record(self, times: RequestTimes) -> None:
        """Spans of one request. Phases that it never came to have none."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        attributes: dict[str, str | int] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.id": times.request_id,
            "gen_ai.usage.prompt_tokens": times.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": times.num_output_tokens,
            "gen_ai.response.finish_reason": times.finish_reason.value,
        }
        span = self._tracer.start_span("llm_request", start_time=self._at(times.arrived), attributes=attributes)
        if times.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(span)
        for name, began, ended in phases(times):
            phase = self._tracer.start_span(name, context=context, start_time=self._at(began))
            phase.end(self._at(ended))
        span.end(self._at(times.ended))

    def close(self) -> None:
        """Send what has not been sent, in CLOSE_SECONDS at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _at(self, seconds: float) -> int:
        return self._offset + int(seconds * 1e9)


def phases(times: RequestTimes) -> list[tuple[str, float, float]]:
    """Each phase that a request came to, with its beginning and its end."""
    moments = [("queue", times.arrived), ("prefill", times.admitted), ("decode", times.first_token)]
    reached = [(name, moment) for name, moment in moments if moment is not None]
    ends = [moment for _, moment in reached[1:]] + [times.ended]
    return [(name, began, ended) for (name, began), ended in zip(reached, ends, strict=True)]
