from __future__ import annotations

import pytest

from millpond.errors import ConfigError
from millpond.lab.http_client import EventReader, Server, exchange
from virtual_loop import run_virtually


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "has_tls"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, "", False),
        ("http://127.0.0.1:8000/", "127.0.0.1", 8000, "", False),
        ("http://a.b/v1", "a.b", 80, "", False),
        ("https://a.b/v1/", "a.b", 443, "", True),
        ("https://a.b:8443/api/v1", "a.b", 8443, "/api", True),
        ("http://[::1]:9000", "::1", 9000, "", False),
    ],
)
def test_a_url_names_the_server_with_or_without_v1(url, host, port, path, has_tls):
    server = Server.at(url, {})
    assert (server.host, server.port, server.path, server.tls is not None) == (host, port, path, has_tls)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://a",
        "http://",
        "http://a:b",
        "http://a:99999",
        "http://a?x=1",
        "http://u:p@a",
        "http://a b",
    ],
)
def test_what_is_no_url_of_a_server_is_refused(url):
    with pytest.raises(ConfigError, match="URL"):
        Server.at(url, {})


@pytest.mark.parametrize(("name", "value"), [("A\r\nB", "x"), ("A", "x\r\nB: y"), ("", "x"), ("A B", "x"), ("A", "é")])
def test_a_header_that_would_be_two_lines_is_refused(name, value):
    with pytest.raises(ConfigError, match="does not fit in one line"):
        Server.at("http://a", {name: value})


def test_a_key_is_not_shown_with_the_server():
    assert "secret" not in repr(Server.at("http://a", {"Authorization": "Bearer secret"}))


def test_a_message_has_the_users_headers_and_the_length_of_its_body():
    message = Server.at("http://[::1]:9000/api", {"X-A": "b", "User-Agent": "mine"}).message("POST", "/v1/x", b"body")
    first, *lines = message.decode().split("\r\n")
    assert first == "POST /api/v1/x HTTP/1.1"
    assert lines[-2:] == ["", "body"]
    assert {"Host: [::1]:9000", "Content-Length: 4", "X-A: b", "User-Agent: mine", "Connection: close"} <= set(lines)
    assert "Host: a\r\n" in Server.at("https://a", {}).message("GET", "/").decode()


def answered(*answer):
    """The exchange that the bytes are the answer to, and what of it was given to on_body."""
    bodies = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for part in answer:
            writer.write(part)
            await writer.drain()

    async def work():
        server = Server.at("http://a", {})
        over = await exchange(server, server.message("GET", "/"), lambda data, now: bodies.append(data))
        await over.done
        return over

    return run_virtually(work, serve), b"".join(bodies)


def test_the_body_of_a_200_is_given_on_and_any_other_is_kept():
    over, body = answered(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-A: b\r\n\r\nabc")
    assert (over.status, over.is_whole, body, over.error_body, over.headers["x-a"]) == (200, True, b"abc", b"", "b")
    over, body = answered(b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nabc")
    assert (over.status, over.is_whole, body, over.error_body) == (404, True, b"", b"abc")


def test_only_the_beginning_of_an_errors_body_is_kept():
    over, _ = answered(b"HTTP/1.1 500 Oh\r\nContent-Length: 9000\r\n\r\n", b"a" * 1500, b"b" * 7500)
    assert over.error_body == b"a" * 1500 + b"b" * 500


@pytest.mark.parametrize(
    ("answer", "status", "is_whole"),
    [
        (b"", 0, False),
        (b"HTTP/1.1 200 OK\r\nContent-Le", 0, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", 200, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", 200, False),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", 200, True),
        (b"not HTTP at all\r\n\r\n", 0, False),
    ],
)
def test_an_answer_is_whole_or_has_a_fault(answer, status, is_whole):
    over, _ = answered(answer)
    assert (over.status, over.is_whole, over.fault is None) == (status, is_whole, is_whole)


def test_an_event_is_what_an_empty_line_ends():
    reader = EventReader()
    assert reader.feed(b"data: a\n") == []
    assert reader.feed(b"data:b\n\ndata: c") == [b"a\nb"]
    assert reader.feed(b"\r\n\r\n: comment\n\n\nevent: x\ndata: d\n") == [b"c"]
    assert reader.end() == [b"d"]
    assert reader.end() == []
