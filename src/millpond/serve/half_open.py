"""Clients that shut down their sending side once they have asked: they still get their answer."""

from __future__ import annotations

import asyncio

from millpond.serve.no_upgrade import NoUpgradeProtocol

# Seconds after a client's last byte at which it is sent an interim response: closed altogether, it resets the
# connection at the first, which shows at the next. Few, for a client may refuse more than a handful.
PROBES = (0.0, 0.3, 0.9)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b"3\r\n:\n\n\r\n"  # a chunk that says nothing, of a stream of events: no other answer comes in chunks


class HalfOpenProtocol(NoUpgradeProtocol):
    """uvicorn's protocol, which takes the end of what a client sends for its end, but for that.

    A socket that is closed and one that is half closed look alike from here, until something is sent: a chunk of the
    answer, or before there is one the interim response that HTTP has for that and clients pass over; once a stream has
    begun, a comment.
    """

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open; over TLS it cannot."""
        is_answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not is_answering or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        for delay in PROBES:
            asyncio.get_running_loop().call_later(delay, self._probe)
        return True

    def _probe(self) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not self.cycle.response_started:
            self.transport.write(CONTINUE)
        elif self.cycle.chunked_encoding:
            self.transport.write(COMMENT)
