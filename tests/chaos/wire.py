"""A client's end of one raw connection: bytes out as they come, answers in through a strict parser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import h11

PIECE = 1 << 16
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time at all: a close is a reset


class ConnectionLost(Exception):
    """The server closed or cut a connection on which an answer was due."""


@dataclass(slots=True)
class Answer:
    """is_whole once the parser has seen the end of it."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    is_whole: bool = False

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    path: str, body: Any, request_id: str, *, method: str = "POST", headers: tuple[str, ...] = ()
) -> bytes:
    """One request. A body that is bytes goes as it is, anything else as JSON; None is no body."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: chaos", f"X-Request-Id: {request_id}", *headers]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


@dataclass(slots=True)
class Wire:
    """One connection. receive_buffer, in bytes, makes what is not read pile up at the server soon."""

    address: tuple[str, int]
    receive_buffer: int | None = None
    _socket: socket.socket = field(init=False)
    _parser: h11.Connection = field(init=False)

    async def open(self) -> None:
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if self.receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        await asyncio.get_running_loop().sock_connect(self._socket, self.address)
        self._parser = h11.Connection(h11.CLIENT)

    async def send(self, data: bytes) -> None:
        """Raises ConnectionLost where the server does not want it any more."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def half_close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket.close()

    async def read(self, size: int = PIECE) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, size)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    async def answer(
        self, *, method: str = "POST", size: int = PIECE, most: int | None = None, pause: float | None = None
    ) -> Answer:
        """The answer to what was sent last, or its beginning where `most` bytes have been read, `size` at a time with a
        `pause` between. Raises ConnectionLost, or h11.RemoteProtocolError for what is not HTTP."""
        # What was really sent may have been anything; the parser only needs to know that an answer is due.
        self._parser.send(h11.Request(method=method, target="/", headers=[("Host", "chaos")]))
        self._parser.send(h11.EndOfMessage())
        got, answer = 0, None
        while most is None or got < most:
            event = self._parser.next_event()
            if event is h11.NEED_DATA:
                data = await self.read(size)
                if not data and answer is None:
                    raise ConnectionLost("closed before an answer")
                got += len(data)
                self._parser.receive_data(data)
                if pause is not None:
                    await asyncio.sleep(pause)
            elif isinstance(event, h11.Response):
                headers = {name.decode(): value.decode() for name, value in event.headers}
                answer = Answer(event.status_code, headers)
            elif isinstance(event, h11.Data):
                answer.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                answer.is_whole = True
                return answer
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionLost("closed before an answer")
        return answer or Answer(0, {})

    def can_ask_again(self) -> bool:
        """Whether the connection may be used again, with nothing on it that nobody asked for."""
        if self._parser.trailing_data[0]:
            raise h11.RemoteProtocolError(f"{self._parser.trailing_data[0][:100]!r} behind an answer")
        if self._parser.our_state is not h11.DONE or self._parser.their_state is not h11.DONE:
            return False
        self._parser.start_next_cycle()
        return True
