"""A load of streamed completions: `python -m millpond.lab.stream_client` reads it as JSON and sends it all at once.

A process of its own that shares the cores with the server it measures, so it does the least: bare sockets, no parsing.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from millpond.errors import EngineError

TAIL_BYTES = 1024
# Woken for every token of every stream, a client costs the server's cores more than a real one, which is elsewhere.
READ_EVERY_SECONDS = 0.005
WELL_ENDED = (b'"finish_reason":"length"', b"data: [DONE]\n\n")


@dataclass(slots=True)
class Stream:
    """One answer as it comes: its first bytes and its last ones."""

    head: bytes = b""
    tail: bytes = field(default=b"", repr=False)

    def take(self, data: bytes) -> None:
        self.head = self.head or data
        self.tail = data if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]

    def check(self) -> None:
        """Raise EngineError unless it went on to its last token."""
        if not self.head.startswith(b"HTTP/1.1 200") or not all(mark in self.tail for mark in WELL_ENDED):
            raise EngineError(f"a stream did not end as it should: {self.head[:200]!r} ... {self.tail[-300:]!r}")


def request_bytes(host: str, port: int, body: bytes) -> bytes:
    """One POST of a completion, after which the server closes the connection."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def stream_all(host: str, port: int, bodies: Sequence[bytes]) -> tuple[float, float]:
    """Send all at once, read to the end. Returns the seconds that took, and this process's processor seconds in them.

    Raises EngineError for an answer that does not end with finish_reason `length`, OSError for what sockets raise.
    """
    selector = selectors.DefaultSelector()
    streams = [Stream() for _ in bodies]
    started, started_cpu = time.perf_counter(), time.process_time()
    for stream, body in zip(streams, bodies, strict=True):
        connection = socket.create_connection((host, port))
        connection.sendall(request_bytes(host, port, body))
        selector.register(connection, selectors.EVENT_READ, (connection, stream))
    while selector.get_map():
        time.sleep(READ_EVERY_SECONDS)
        for key, _ in selector.select():
            connection, stream = key.data
            if data := connection.recv(1 << 16):
                stream.take(data)
            else:
                selector.unregister(connection)
                connection.close()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    for stream in streams:
        stream.check()
    return seconds, cpu_seconds


def main() -> None:
    """Read {"host", "port", "bodies"} from standard input; print {"seconds", "cpu_seconds"}."""
    load = json.load(sys.stdin)
    bodies = [json.dumps(body).encode() for body in load["bodies"]]
    seconds, cpu_seconds = stream_all(load["host"], load["port"], bodies)
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}))


if __name__ == "__main__":
    main()
