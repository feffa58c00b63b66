"""Real sockets on loopback: clients that half close, that leave, that do not read, and a thousand at once."""

from __future__ import annotations

import json
import resource
import selectors
import socket
import threading
import time

import httpx
import pytest

from millpond.config import LoadLimits
from millpond.core.step import SampledTokens, StepResult
from millpond.serve import open_files
from millpond.serve.half_open import CONTINUE
from tiny_engine import BOUND_SECONDS, LETTERS, GatedRunner, UnhurriedRunner, make_engine
from tiny_server import listening

PATH = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 9000}
ROOMY = {"num_blocks": 9000, "max_model_len": 10_000, "audit": False, "wrap": UnhurriedRunner}


class OneLetterRunner:
    """The same letter for everybody, as fast as the event loop hands letters out: a step that ran ahead of it would
    leave every reader behind."""

    def __init__(self, engine):
        self.engine, self.num_steps = engine, 0

    def execute(self, output):
        self.num_steps += 1
        async_engine, turn = self.engine.observer.__self__, threading.Event()
        async_engine._loop.call_soon_threadsafe(turn.set)
        assert turn.wait(BOUND_SECONDS), "the event loop has no turn left"
        return StepResult(tuple(SampledTokens(each.request_id, (LETTERS[0],)) for each in output.scheduled))


def connect(server, body, *, half_close=False, over=None):
    """A connection that has asked."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = over or socket.socket()
    connection.settimeout(BOUND_SECONDS)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    if half_close:
        connection.shutdown(socket.SHUT_WR)
    return connection


def read_all(connection):
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    connection.close()
    return data


def wait_for(condition):
    bound = time.monotonic() + BOUND_SECONDS
    while not condition():
        assert time.monotonic() < bound, "it did not come to that"
        time.sleep(0.002)  # a thread that only looks would keep the interpreter from those of the server


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_gets_its_whole_answer(stream):
    with listening(make_engine()) as server:
        answer = read_all(connect(server, {**BODY, "stream": stream}, half_close=True))
    answer = answer.replace(CONTINUE, b"")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"data: [DONE]" if stream else b'"completion_tokens":5') in answer
    assert b"connection: close" in answer


def test_a_client_that_half_closes_while_it_waits_is_probed_and_answered():
    engine = make_engine(wrap=GatedRunner)
    with listening(engine) as server:
        connection = connect(server, BODY, half_close=True)
        assert connection.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        engine.runner.open_for_good()
        assert b'"completion_tokens":5' in read_all(connection)


def test_what_half_closes_in_the_middle_of_its_body_is_gone(caplog):
    caplog.set_level("INFO", "millpond.access")
    with listening(make_engine()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=BOUND_SECONDS) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        wait_for(lambda: "POST /v1/completions" in caplog.text)
    assert "POST /v1/completions 499" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hi", ["a", "b", "c"]])
def test_a_client_that_leaves_frees_what_it_had_streamed_or_not(stream, prompt):
    engine = make_engine(max_num_seqs=3, **ROOMY)
    with listening(engine) as server:
        connection = connect(server, {**ENDLESS, "prompt": prompt, "max_tokens": 9000, "stream": stream})
        wait_for(lambda: engine.scheduler.num_running == (1 if prompt == "hi" else 3))
        connection.close()
        wait_for(lambda: engine.scheduler.num_running == 0)
    assert len(engine.runner.inner.outputs) < 9000


def test_a_client_that_leaves_the_queue_when_its_stream_has_begun_never_runs():
    engine = make_engine(max_num_seqs=1, **ROOMY)
    with listening(engine) as server:
        running = connect(server, ENDLESS)
        wait_for(lambda: engine.scheduler.num_running == 1)
        waiting = connect(server, {**BODY, "stream": True})
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += waiting.recv(1)
        waiting.close()  # all is read, so that it ends without a reset
        wait_for(lambda: engine.scheduler.num_waiting == 0)
        running.close()
        wait_for(lambda: not engine.scheduler.requests)
    assert len({each.request_id for plan in engine.runner.inner.outputs for each in plan.scheduled}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_never_runs(stream):
    engine = make_engine(max_num_seqs=1, **ROOMY)
    with listening(engine) as server:
        running = connect(server, ENDLESS)
        wait_for(lambda: engine.scheduler.num_running == 1)
        waiting = connect(server, {**BODY, "stream": stream, "prompt": ["later", "too"]})
        wait_for(lambda: engine.scheduler.num_waiting == 2)
        waiting.close()
        wait_for(lambda: engine.scheduler.num_waiting == 0)
        assert engine.scheduler.num_running == 1
        running.close()
        wait_for(lambda: not engine.scheduler.requests)
    assert len({each.request_id for plan in engine.runner.inner.outputs for each in plan.scheduled}) == 1


def test_a_client_that_does_not_read_is_ended_at_a_bound_while_its_neighbour_has_every_token(caplog):
    engine = make_engine(num_blocks=40_000, max_model_len=150_000, audit=False)
    engine.runner = OneLetterRunner(engine)
    load = LoadLimits(max_unread_outputs=100)
    with listening(engine, load=load) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck = connect(server, {**ENDLESS, "max_tokens": 140_000, "stream": True}, over=connection)
        with httpx.Client(base_url=server.url, timeout=BOUND_SECONDS) as client:
            assert client.post(PATH, json={**BODY, "max_tokens": 500}).json()["usage"]["completion_tokens"] == 500
            wait_for(lambda: "its client has left" in caplog.text)
            wait_for(lambda: not engine.scheduler.requests)
        stuck.close()
    assert engine.runner.num_steps < 140_000
    assert engine.scheduler.pool.num_free == 40_000


def test_a_thousand_streams_are_held_open_at_once_and_all_are_answered():
    engine = make_engine(wrap=GatedRunner, max_num_seqs=64, num_blocks=256, audit=False)
    with listening(engine) as server:
        connections = [connect(server, {**BODY, "stream": True}) for _ in range(1000)]
        engine.runner.open_for_good()
        answers = read_every(connections)
    assert len(answers) == 1000
    assert all(answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer for answer in answers)
    assert engine.scheduler.pool.num_free == 256


def read_every(connections):
    """All answers, each to the end of its stream, whichever comes first."""
    selector, answers = selectors.DefaultSelector(), {}
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ)
        answers[connection] = b""
    while selector.get_map():
        events = selector.select(BOUND_SECONDS)
        assert events, "no stream goes on"
        for key, _ in events:
            answers[key.fileobj] += (piece := key.fileobj.recv(1 << 16))
            if not piece or answers[key.fileobj].endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return list(answers.values())


@pytest.mark.parametrize(("limits", "raised", "is_told"), [((256, 8192), 8192, False), ((256, 512), 512, True)])
def test_the_limit_on_open_files_is_raised_to_the_highest_and_a_low_one_is_told(
    limits, raised, is_told, monkeypatch, caplog
):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: asked.append(pair))
    assert open_files.raise_open_files() == raised
    assert asked == [(raised, raised)]
    assert (f"{raised} open files" in caplog.text) is is_told
