"""One HTTP/1.1 request over a connection of its own, for clients that measure: what came, and when by the loop's clock.

httptools parses; nothing is buffered here, nothing is redirected or tried again. A general client library costs several
times as much processor time for each streamed token, and shares the cores with what it measures.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from millpond.errors import ConfigError
from millpond.version import __version__

PORTS = {"http": 80, "https": 443}
BODY_SHOWN = 2000  # bytes of an error's body that are kept


@dataclass(frozen=True, slots=True)
class Server:
    """Where an API is: path is what stands in front of its routes, headers go with every request."""

    host: str
    port: int
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # an API key is nobody else's business
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def at(cls, url: str, headers: Mapping[str, str]) -> Server:
        """The server of a URL, with or without the /v1 of its routes. Raises ConfigError for what is none."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in PORTS or not parts.hostname or parts.query or parts.username or not _is_plain(url):
            raise ConfigError(f"{url!r} is not the URL of a server; say http://127.0.0.1:8000 or https://host/v1")
        for name, value in headers.items():
            if not name or not _is_plain(name) or ":" in name or not value.isprintable() or not value.isascii():
                raise ConfigError(f"the header {name!r} does not fit in one line of HTTP")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, PORTS[parts.scheme] if port is None else port, path, dict(headers), tls)

    @property
    def _host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS["https" if self.tls else "http"] else f"{host}:{self.port}"

    def message(self, method: str, route: str, body: bytes = b"") -> bytes:
        """A request as it goes over the wire; the server closes the connection after its answer."""
        fields = {
            "Host": self._host_header,
            "User-Agent": f"millpond/{__version__}",
            "Accept": "*/*",
            "Connection": "close",
            **({"Content-Type": "application/json", "Content-Length": str(len(body))} if body else {}),
            **self.headers,
        }
        lines = [f"{method} {self.path}{route} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


class Exchange(asyncio.Protocol):
    """A request and its answer. sent and each call of on_body have the loop's time; on_body gets the body of a 200.

    After `done`: is_whole says whether the answer came to its end, status is 0 where none began, error_body has the
    beginning of the body of any other status, and fault what broke the connection or was not HTTP.
    """

    def __init__(self, message: bytes, on_body: Callable[[bytes, float], None]) -> None:
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._message = message
        self._on_body = on_body
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._now = 0.0
        self.done: asyncio.Future[None] = loop.create_future()
        self.sent: float | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.error_body = b""
        self.is_whole = False
        self.fault: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent = self._clock()
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self.is_whole or self.fault:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(f"not HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.status == 200:
            self._on_body(data, self._now)
        else:
            self.error_body += data[: BODY_SHOWN - len(self.error_body)]

    def on_message_complete(self) -> None:
        self.is_whole = True
        self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_whole and self.fault is None:
            # Without a length and without chunks a body ends where the connection does.
            is_open_ended = self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))
            self.is_whole = bool(self.status) and is_open_ended and error is None
            self.fault = None if self.is_whole else str(error or "the connection was closed")
        self._end(self.fault)

    def _end(self, fault: str | None) -> None:
        self.fault = fault
        if self._transport is not None:
            self._transport.abort()
        if not self.done.done():
            self.done.set_result(None)

    def hang_up(self) -> None:
        """Close the connection at once, whatever has come."""
        self._end(self.fault or "hung up")


async def exchange(server: Server, message: bytes, on_body: Callable[[bytes, float], None]) -> Exchange:
    """Connect and send; returns once the request is on its way. Raises OSError where there is no connection."""
    loop = asyncio.get_running_loop()
    server_hostname = server.host if server.tls else None
    _, protocol = await loop.create_connection(
        lambda: Exchange(message, on_body), server.host, server.port, ssl=server.tls, server_hostname=server_hostname
    )
    return protocol


class EventReader:
    """Server-sent events out of a body that comes in pieces cut anywhere; gives the data of each event."""

    def __init__(self) -> None:
        self._pending = b""
        self._lines: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end in these bytes."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                self._lines.append(line[5:].strip())
            elif self._lines and line in (b"", b"\r"):
                found.append(b"\n".join(self._lines))
                self._lines = []
        return found

    def end(self) -> list[bytes]:
        """The data of an event that the body ended in, for servers that leave out the last empty line."""
        return self.feed(b"\n\n")
