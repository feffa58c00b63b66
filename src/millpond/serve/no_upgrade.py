"""Requests that ask to go on in another protocol: they are answered as if they had not (RFC 9110, 7.8)."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class _Parser(httptools.HttpRequestParser):
    """A parser that leaves off at the end of such a request's head; another one reads the head again without the wish,
    as this one may take what follows for the end of the connection."""

    def __init__(self, protocol: NoUpgradeProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self.protocol = protocol
        self.plain_head: bytes | None = None  # of the request whose head has just been read, where it has the wish

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        parser = self
        while True:
            try:
                super(_Parser, parser).feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if parser.plain_head is None:
                    raise
                data = parser.plain_head + data[upgrade.args[0] :]
                parser = self.protocol.parser = _Parser(self.protocol)


class NoUpgradeProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which takes a body behind such a head for the other protocol's."""

    parser: _Parser

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.parser = _Parser(self)

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self.parser.plain_head = self._plain_head(method, self.parser.get_http_version())
        else:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.plain_head is None:
            super().on_message_complete()

    def _plain_head(self, method: bytes, version: str) -> bytes:
        """The head that has been read, without Upgrade."""
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(each for each in value.split(b",") if each.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])
