"""How a server begins and ends: readiness, drains, signals, what half-sent bodies and slow readers may hold up."""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from millpond.config import ServerConfig
from millpond.engine.async_engine import AsyncEngine
from millpond.errors import ConfigError, EngineDeadError, InvariantError
from millpond.serve import server as server_module
from millpond.serve.drain import Drain
from millpond.serve.run import access_lines, serve
from tiny_engine import BOUND_SECONDS, GatedRunner, make_engine, run
from tiny_server import HandDriven, app_over, listening, started
from tls_pair import certificate_in

STREAM = {"prompt": "hi", "max_tokens": 20, "ignore_eos": True, "stream": True}
FOR_EVER = BOUND_SECONDS * 100


def endless_engine(**settings):
    return make_engine(num_blocks=30_000, max_model_len=100_000, audit=False, **settings)


ENDLESS = {**STREAM, "max_tokens": 90_000}


def test_ready_is_no_before_the_engine_has_started_and_once_a_drain_has_begun():
    engine, drain = make_engine(), Drain()

    async def test():
        async_engine = AsyncEngine(engine)
        app = app_over(engine, async_engine, drain=drain)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            answers = [await client.get("/ready")]
            async_engine.start()
            answers.append(await client.get("/ready"))
            drain.begin()
            answers.append(await client.get("/ready"))
            health = await client.get("/health")
            refused = await client.post("/v1/completions", json=STREAM)
            await async_engine.shutdown()
        return answers, health, refused

    answers, health, refused = run(test())
    assert [(each.status_code, each.json()["status"]) for each in answers] == [
        (503, "not serving"),
        (200, "ready"),
        (503, "draining"),
    ]
    assert health.status_code == 200
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "server_error"
    assert "shutting down" in refused.json()["error"]["message"]
    assert engine.runner.outputs == []


class HalfSent(HandDriven):
    """A client that has sent the beginning of a body, and that sends no more."""

    async def _receive(self):
        if self._body_read:
            await asyncio.Event().wait()
        self._body_read = True
        return {"type": "http.request", "body": self._body[:5], "more_body": True}


def test_a_drain_refuses_the_bodies_that_are_on_their_way_and_lets_running_answers_be():
    engine, drain = make_engine(wrap=GatedRunner), Drain()

    async def test():
        async with started(engine, drain=drain) as (_, client):
            running = asyncio.create_task(client.post("/v1/completions", json={**STREAM, "stream": False}))
            await engine.runner.wait_until_entered()
            half = HalfSent(client._transport.app, "/v1/completions", STREAM)
            while not half._body_read:
                await asyncio.sleep(0)
            assert half.sent.empty()
            drain.begin()
            await half.task
            engine.runner.open_for_good()
            return [await half.sent.get() for _ in range(2)], await running

    (start, body), running = run(test())
    assert start["status"] == 503
    assert "shutting down" in json.loads(body["body"])["error"]["message"]
    assert running.status_code == 200
    assert running.json()["usage"]["completion_tokens"] == 20


def wait_until_refused(url):
    host, port = url.rpartition("/")[2].split(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=BOUND_SECONDS).close()
        except ConnectionError:  # refused, or reset while the listener closes
            return


def half_sent(url, body=b'{"prompt": "', num_bytes=1000):
    """A socket over which a request's head and a part of its body have gone, and have been read."""
    host, port = url.rpartition("/")[2].split(":")
    half = socket.create_connection((host, int(port)), timeout=BOUND_SECONDS)
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    half.sendall(b"Content-Length: %d\r\n\r\n%b" % (num_bytes, body))
    assert httpx.get(f"{url}/health").status_code == 200
    return half


def read_all(one):
    with one:
        received = b""
        while part := one.recv(65536):
            received += part
        return received


def test_stopping_lets_running_answers_end_and_takes_no_new_ones():
    engine = make_engine(wrap=GatedRunner)
    with listening(engine) as server, httpx.Client(base_url=server.url, timeout=BOUND_SECONDS) as client:
        engine.runner.let_through(1)
        with client.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            wait_until_refused(server.url)
            engine.runner.open_for_good()
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) == 20


def test_a_drain_that_takes_too_long_ends_every_answer_with_an_error():
    engine, whole = make_engine(wrap=GatedRunner), queue.Queue()
    with (
        listening(engine, drain_timeout=0.1) as server,
        httpx.Client(base_url=server.url, timeout=BOUND_SECONDS) as client,
    ):
        engine.runner.let_through(1)
        body = {**STREAM, "stream": False}
        asking = threading.Thread(target=lambda: whole.put(client.post("/v1/completions", json=body)))
        with client.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            next(lines)
            asking.start()
            async_engine = engine.observer.__self__
            while async_engine.num_unfinished < 2:
                pass
            server.stop()
            rest = [line for line in lines if line]
        asking.join(BOUND_SECONDS)
        engine.runner.open_for_good()
    assert len(rest) == 1
    assert "shutting down" in json.loads(rest[0].removeprefix("data: "))["error"]["message"]
    refused = whole.get(timeout=BOUND_SECONDS)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert engine.scheduler.requests == {}


def test_a_half_sent_body_is_refused_at_once_and_holds_up_no_shutdown(caplog):
    with listening(make_engine(), drain_timeout=FOR_EVER) as server:
        half = half_sent(server.url)
        server.stop()
        answer = read_all(half)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "the server is shutting down"
    assert "Traceback" not in caplog.text


def test_who_does_not_read_is_cut_off_after_the_drain(monkeypatch, caplog):
    monkeypatch.setattr(server_module, "FAREWELL_SECONDS", 0.1)
    engine = endless_engine()
    # Each event repeats the name of the model: a few of them are more than any socket keeps.
    with listening(engine, drain_timeout=0.1, model_names=("x" * 10**5,)) as server:
        deaf = half_sent(server.url, b"", num_bytes=len(body := json.dumps(ENDLESS).encode()))
        deaf.sendall(body)
        deaf.recv(1)
        while engine.metrics.generation_tokens < 200:
            pass
        server.stop()
    deaf.close()
    assert engine.scheduler.requests == {}
    assert "Traceback" not in caplog.text
    assert "Exception in ASGI application" not in caplog.text


def serving_thread(engine, **settings):
    """A server in a thread, and where its URL and then its error or None will be."""
    came = queue.Queue()

    def target():
        try:
            serve(
                engine,
                port=0,
                config=ServerConfig(**settings),
                notify=lambda line: None,
                on_ready=lambda running: came.put(running.url),
            )
            came.put(None)
        except EngineDeadError as error:
            came.put(error)

    thread = threading.Thread(target=target)
    thread.start()
    return thread, came


def test_a_server_whose_engine_has_died_tells_its_callers_and_ends_with_the_cause(caplog):
    engine = make_engine(wrap=GatedRunner)
    schedule, steps = engine.scheduler.schedule, []

    def breaking(*arguments):
        steps.append(1)
        if len(steps) == 3:
            raise InvariantError("INV-1: block 3 is free and held")
        return schedule(*arguments)

    engine.scheduler.schedule = breaking
    engine.runner.open_for_good()
    thread, came = serving_thread(engine, drain_timeout=FOR_EVER)
    url = came.get(timeout=BOUND_SECONDS)
    with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=BOUND_SECONDS) as response:
        request_id = response.headers["x-request-id"]
        events = [line for line in response.iter_lines() if line]
    assert len(events) == 3
    assert "INV-1" in events[-1]
    error = came.get(timeout=BOUND_SECONDS)
    thread.join(BOUND_SECONDS)
    assert isinstance(error, EngineDeadError)
    assert "INV-1: block 3" in str(error)
    assert f"requests that end with it: cmpl-{request_id}-0" in caplog.text
    wait_until_refused(url)


def test_a_step_that_fails_ends_its_requests_and_the_server_goes_on(caplog):
    with listening(make_engine(raises={1: RuntimeError("boom")})) as server:
        first = httpx.post(f"{server.url}/v1/completions", json={**STREAM, "stream": False})
        second = httpx.post(f"{server.url}/v1/completions", json={**STREAM, "stream": False})
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert (first.status_code, second.status_code) == (500, 200)
    assert f"cmpl-{first.headers['x-request-id']}-0" in caplog.text


CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from millpond.config import ServerConfig
from millpond.serve.logs import configure_logging
from millpond.serve.run import serve
from tiny_engine import GatedRunner, UnhurriedRunner, make_engine
configure_logging("info", "text")

wrap = GatedRunner if sys.argv[3] == "stuck" else UnhurriedRunner
engine = make_engine(num_blocks=30_000, max_model_len=100_000, audit=False, wrap=wrap)
config = ServerConfig(drain_timeout=float(sys.argv[2]))
serve(engine, port=0, config=config, notify=lambda line: None, on_ready=lambda it: print(it.url, flush=True))
print("returned", flush=True)
"""


def serve_in_a_process(drain_timeout, runner="free"):
    """A server in a process of its own whose engine answers without end, or never; the process and its URL."""
    arguments = [sys.executable, "-c", CODE, str(Path(__file__).parents[1]), str(drain_timeout), runner]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def ended(process):
    """What a process that served wrote to standard error; it returned and came to its end with 0."""
    out, err = process.communicate(timeout=BOUND_SECONDS)
    assert (process.returncode, out) == (0, "returned\n"), err
    assert "Traceback" not in err
    assert "CancelledError" not in err
    return err


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_process_with_0_and_every_stream_with_an_error(sent):
    process, url = serve_in_a_process(0.2)
    with process, httpx.Client(base_url=url, timeout=BOUND_SECONDS) as client:
        with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(sent)
            rest = [line for line in lines if line]
        log = ended(process)
    assert "shutting down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    assert all(json.loads(line.removeprefix("data: ")) for line in rest)
    assert f"[{response.headers['x-request-id']}]" in log
    wait_until_refused(url)


@pytest.mark.parametrize("runner", ["free", "stuck"])
def test_a_second_signal_ends_at_once_whatever_is_under_way(runner):
    process, url = serve_in_a_process(FOR_EVER, runner)
    with process, httpx.Client(base_url=url, timeout=BOUND_SECONDS) as client:
        came = queue.Queue()

        def ask():
            try:
                came.put(client.post("/v1/completions", json={**ENDLESS, "stream": False}).status_code)
            except httpx.TransportError as error:
                came.put(error)

        asking = threading.Thread(target=ask)
        asking.start()
        while 'vllm:num_requests_running{model_name="tiny"} 1.0' not in httpx.get(f"{url}/metrics").text:
            pass
        half = half_sent(url)
        process.send_signal(signal.SIGTERM)
        assert read_all(half).startswith(b"HTTP/1.1 503 ")
        wait_until_refused(url)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        log = ended(process)
        asking.join(BOUND_SECONDS)
    answer = came.get(timeout=BOUND_SECONDS)
    assert answer == 503 or isinstance(answer, httpx.TransportError)
    assert ("the step in progress has not ended in 0.5 s" in log) is (runner == "stuck")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return certificate_in(tmp_path_factory.mktemp("pair"))


def test_with_a_certificate_the_server_speaks_https_and_nothing_else(pair, caplog):
    cert, key = pair
    context = ssl.create_default_context(cafile=cert.parent / "ca.pem")
    with listening(make_engine(), tls_cert=cert, tls_key=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=server.url, verify=context) as client:
            assert client.post("/v1/completions", json={**STREAM, "stream": False}).status_code == 200
            assert client.post("/v1/completions", json=STREAM).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http"))


def test_a_certificate_that_cannot_serve_is_refused_before_anything_listens(pair, tmp_path):
    cert, _ = pair
    with pytest.raises(ConfigError, match="no certificate and key of one pair"):
        serve(make_engine(), port=0, config=ServerConfig(tls_cert=cert))
    (tmp_path / "text.pem").write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"text\.pem"):
        serve(make_engine(), port=0, config=ServerConfig(tls_cert=tmp_path / "text.pem"))


@pytest.mark.parametrize(
    ("host", "keys", "told"),
    [
        ("127.0.0.1", (), ""),
        ("::1", (), ""),
        ("127.0.0.1", ("a", "b"), "need an API key, of which there are 2"),
        ("0.0.0.0", ("a",), "need an API key, of which there are 1"),
        ("0.0.0.0", (), "no API key is set"),
        ("::", (), "no API key is set"),
        ("fe80::1%eth0", (), "no API key is set"),
    ],
)
def test_the_start_up_lines_say_who_may_ask(host, keys, told):
    line = "".join(access_lines(host, ServerConfig(api_keys=keys)))
    assert told in line
    assert bool(line) is bool(told)
