"""Real sockets on loopback: who asks to go on in another protocol gets the answer of who does not."""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager

import pytest

from tiny_engine import BOUND_SECONDS, make_engine
from tiny_server import listening

BODY = json.dumps({"prompt": "hi", "max_tokens": 5, "ignore_eos": True}).encode()
WISHES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
every_wish = pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)


@pytest.fixture(scope="module")
def server():
    with listening(make_engine()) as running:
        yield running


@contextmanager
def connected(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=BOUND_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def rest_of(connection) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def head(wish: bytes, framing: bytes = b"Content-Length: %d" % len(BODY)) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b%b\r\n\r\n" % (
        wish,
        framing,
    )


def assert_both_answered(answers: bytes) -> None:
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert b'"completion_tokens":5' in answers
    assert b'{"status":"ok"' in answers


@every_wish
@pytest.mark.parametrize("length", [1, 60, 200, 400, 10_000])
def test_its_body_is_read_however_it_arrives_and_the_request_behind_it_is_answered(server, wish, length):
    sent = head(wish) + BODY + LAST
    with connected(server) as connection:
        for start in range(0, len(sent), length):
            connection.sendall(sent[start : start + length])
        assert_both_answered(rest_of(connection))


@every_wish
def test_its_body_may_come_in_chunks(server, wish):
    with connected(server) as connection:
        connection.sendall(
            head(wish, b"Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) + LAST
        )
        assert_both_answered(rest_of(connection))


@every_wish
def test_its_connection_stays_open_or_is_closed_as_it_asks(server, wish):
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n" + wish
    with connected(server) as connection:
        connection.sendall((ask + b"\r\n") * 2 + ask + b"Connection: close\r\n\r\n" + LAST)
        assert rest_of(connection).count(b"HTTP/1.1 200 OK\r\n") == 3


def test_a_tunnel_is_refused(server):
    with connected(server) as connection:
        connection.sendall(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
