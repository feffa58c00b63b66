from __future__ import annotations

import http.server
import queue
import threading

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from millpond.core.request import FinishReason
from millpond.engine.metrics import RequestTimes
from millpond.serve import tracing
from millpond.serve.tracing import RequestTracer
from tiny_engine import BOUND_SECONDS, make_engine
from tiny_server import listening

GOOD = RequestTimes("cmpl-1-0", 100.0, 102.0, 105.0, 109.0, 109.0, FinishReason.LENGTH, 7, 3)


def spans_of(*requests):
    """The spans of these requests, as (name, seconds, its parent's name), and the exported spans by name."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, "tiny")
    for times in requests:
        tracer.record(times)
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    told = [
        (span.name, (span.end_time - span.start_time) / 1e9, span.parent and names[span.parent.span_id])
        for span in spans
    ]
    return told, {span.name: span for span in spans}


def test_a_request_is_one_span_with_its_phases_below_it():
    told, spans = spans_of(GOOD)
    assert told == [
        ("queue", 2.0, "llm_request"),
        ("prefill", 3.0, "llm_request"),
        ("decode", 4.0, "llm_request"),
        ("llm_request", 9.0, None),
    ]
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert dict(spans["llm_request"].attributes) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "cmpl-1-0",
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.response.finish_reason": "length",
    }
    assert spans["llm_request"].status.is_ok


def test_two_requests_are_two_traces():
    told, _ = spans_of(GOOD, GOOD._replace(request_id="other"))
    assert len(told) == 8
    assert [name for name, _, parent in told if parent is None] == ["llm_request"] * 2


@pytest.mark.parametrize(
    ("times", "phases"),
    [
        (GOOD._replace(admitted=None, first_token=None, last_token=None), [("queue", 9.0)]),
        (GOOD._replace(first_token=None, last_token=None), [("queue", 2.0), ("prefill", 7.0)]),
    ],
)
def test_a_phase_that_a_request_never_came_to_has_no_span(times, phases):
    told, _ = spans_of(times._replace(finish_reason=FinishReason.ABORT))
    assert [(name, seconds) for name, seconds, parent in told if parent] == phases


def test_a_request_that_failed_is_marked_as_one():
    _, spans = spans_of(GOOD._replace(finish_reason=FinishReason.ERROR))
    assert not spans["llm_request"].status.is_ok


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what is posted."""

    received: queue.Queue

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.put((self.path, self.headers["Content-Encoding"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def collector():
    """A collector of traces on loopback: its URL and its handler's class."""
    handler = type("Own", (Collector,), {"received": queue.Queue()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_sends_a_trace_of_each_request_to_the_collector(collector):
    url, handler = collector
    with listening(make_engine(), otlp_endpoint=url) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 3, "ignore_eos": True})
    path, encoding, body = handler.received.get(timeout=BOUND_SECONDS)
    assert (path, encoding) == ("/v1/traces", None)
    request = ExportTraceServiceRequest.FromString(body)
    [resource] = request.resource_spans
    assert {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"] == "millpond"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    attributes = {each.key: each.value for each in spans["llm_request"].attributes}
    assert attributes["gen_ai.request.id"].string_value == f"{answer.json()['id']}-0"
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 3


def test_a_collector_that_does_not_answer_holds_up_no_shutdown(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.1)
    hanging, closed = threading.Event(), []

    class Hanging(TracerProvider):
        def shutdown(self):
            hanging.wait()
            closed.append(True)

    RequestTracer(Hanging(shutdown_on_exit=False), "tiny").close()
    assert closed == []
    hanging.set()
