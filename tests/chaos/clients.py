"""Clients of every kind, good and bad, and what each may be told."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11

from chaos.asks import CHAT, COMPLETIONS, Ask, Streamed, can_stream, essence, is_beginning, join
from chaos.server import INJECTED
from chaos.wire import Answer, ConnectionLost, Wire, request_bytes

BOUND_SECONDS = 60.0
FORWARD_FAILED = "the forward pass of this step failed"
SMALL_BUFFER = 4096

# Bodies that are wrong, each in its own way; none of them may be answered with anything but a 400 in the one shape.
MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\x00",
    b"\xff\xfe{}",
    b'{"prompt": "hi"',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a\\u0000b"}',
    b'{"prompt": ""}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [99999999]}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": "hi", "max_tokens": -1}',
    b'{"prompt": "hi", "max_tokens": 1e400}',
    b'{"prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "hi", "temperature": NaN}',
    b'{"prompt": "hi", "n": 0}',
    b'{"prompt": "hi", "n": true}',
    b'{"prompt": "hi", "stop": [""]}',
    b'{"prompt": "hi", "logit_bias": {"x": 1}}',
    b'{"prompt": "hi", "timeout": -1}',
    b'{"prompt": "hi", "stream": "yes"}',
    b'{"prompt": "hi", "stream_options": {"include_usage": true}}',
    b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"prompt": "' + b"a" * 20_000 + b'"}',
)
NOT_HTTP: tuple[bytes, ...] = (
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: minus one\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: %b\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
)
ELSEWHERE: tuple[tuple[str, str, Any, int], ...] = (
    ("GET", "/v1/completions", None, 405),
    ("POST", "/v1/nothing", {}, 404),
    ("POST", "/v1/completions", {"prompt": "hi", "model": "../../etc/passwd"}, 404),
    ("POST", "/v1/embeddings", {"input": "hi"}, 400),
    ("POST", "/tokenize", {"prompt": "hi"}, 200),
    ("POST", "/detokenize", {"tokens": [70, 71]}, 200),
    ("POST", "/detokenize", {"tokens": [-5]}, 400),
    ("GET", "/health", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/v1/models", None, 200),
    ("GET", "/openapi.json", None, 200),
)


@dataclass(slots=True)
class Entry:
    """One request in the clients' book. choices are those it asked for, complete ones those it got whole. One that
    has_left may have a status or none, and may never have become a request."""

    kind: str
    choices: int = 0
    status: int | None = None
    complete: int = 0
    has_left: bool = False


@dataclass(slots=True)
class Book:
    """What the clients sent and heard, and everything that should not have come."""

    entries: dict[str, Entry] = field(default_factory=dict)
    told: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_equal: int = 0

    def complain(self, request_id: str, what: str) -> None:
        self.wrong.append(f"{request_id} ({self.entries[request_id].kind}): {what}")


@dataclass(slots=True)
class World:
    """What all clients share. alone holds each ask's answer when nobody else asks; goes_on says whether to go on."""

    address: tuple[str, int]
    asks: list[Ask]
    long_asks: list[Ask]
    alone: dict[int, dict[str, Any]]
    max_body_bytes: int
    book: Book
    goes_on: Callable[[], bool]
    turned: asyncio.Event = field(default_factory=asyncio.Event)

    def turn(self) -> None:
        """Somebody is done with something: who was refused may try again."""
        self.turned.set()
        self.turned = asyncio.Event()


class Client:
    """One client: it does one thing after another, each drawn by its seed."""

    def __init__(self, world: World, number: int, seed: int) -> None:
        self.world, self.number = world, number
        self._draw = random.Random(f"{seed}-{number}")
        self._count = 0
        self._wire: Wire | None = None
        self._kinds = {
            self.asks_whole: 30,
            self.asks_for_a_stream: 25,
            self.half_closes: 5,
            self.is_in_a_hurry: 8,
            self.leaves_before_the_first_byte: 8,
            self.leaves_in_the_middle: 8,
            self.leaves_in_its_body: 3,
            self.sends_nonsense: 6,
            self.sends_no_http: 2,
            self.sends_too_much: 3,
            self.asks_elsewhere: 5,
            self.reads_slowly: 2,
            self.never_reads: 1,
        }

    async def run(self) -> None:
        while self.world.goes_on():
            kind = self._draw.choices(list(self._kinds), list(self._kinds.values()))[0]
            request_id = f"c{self.number}-{self._count}"
            self._count += 1
            self._entry = self.world.book.entries[request_id] = Entry(kind.__name__)
            self._id = request_id
            try:
                async with asyncio.timeout(BOUND_SECONDS):
                    await kind()
            except TimeoutError:
                self._wrong("never answered")
                self._drop()
            except (ConnectionLost, h11.RemoteProtocolError, ValueError, KeyError) as error:
                self._wrong(f"{type(error).__name__}: {error}")
                self._drop()
            if self._entry.status == 429:
                await self._wait_for_turns(self._draw.randint(1, 12))
            else:
                self.world.turn()
        self._drop()

    async def _wait_for_turns(self, count: int) -> None:
        """Until others were done with so many things, or until it seems that nobody is."""
        for _ in range(count):
            try:
                await asyncio.wait_for(self.world.turned.wait(), self._draw.uniform(0.1, 0.4))
            except TimeoutError:
                return

    def _wrong(self, what: str) -> None:
        self.world.book.complain(self._id, what)

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    async def _fresh(self, receive_buffer: int | None = None) -> Wire:
        """A connection of its own, in place of the one that was kept."""
        self._drop()
        self._wire = Wire(self.world.address, receive_buffer)
        await self._wire.open()
        return self._wire

    async def _kept(self) -> Wire:
        return self._wire or await self._fresh()

    def _done(self, wire: Wire) -> None:
        if not wire.can_ask_again():
            self._drop()

    def _ask(self, asks: list[Ask] | None = None, *, stream: bool = False) -> Ask:
        asks = [each for each in asks or self.world.asks if can_stream(each) or not stream]
        ask = self._draw.choice(asks)
        self._entry.choices = len(self.world.alone[ask.number]["choices"])
        return ask

    def _request(self, ask: Ask, body: dict[str, Any]) -> bytes:
        return request_bytes(ask.path, body, self._id)

    # What good clients do.

    async def asks_whole(self) -> None:
        ask, wire = self._ask(), await self._kept()
        await wire.send(self._request(ask, ask.body))
        self._judge(ask, await wire.answer())
        self._done(wire)

    async def asks_for_a_stream(self) -> None:
        ask, wire = self._ask(stream=True), await self._kept()
        await wire.send(self._request(ask, ask.streamed()))
        self._judge(ask, await wire.answer())
        self._done(wire)

    async def half_closes(self) -> None:
        is_stream = self._draw.random() < 0.5
        ask, wire = self._ask(stream=is_stream), await self._fresh()
        await wire.send(self._request(ask, ask.streamed() if is_stream else ask.body))
        wire.half_close()
        self._judge(ask, await wire.answer())
        self._drop()

    async def is_in_a_hurry(self) -> None:
        is_stream = self._draw.random() < 0.5
        ask, wire = self._ask(stream=is_stream), await self._kept()
        body = {**(ask.streamed() if is_stream else ask.body), "timeout": 10 ** self._draw.uniform(-3.5, -0.5)}
        await wire.send(self._request(ask, body))
        self._judge(ask, await wire.answer(), may_be_late=True)
        self._done(wire)

    async def asks_elsewhere(self) -> None:
        method, path, body, status = self._draw.choice(ELSEWHERE)
        wire = await self._kept()
        await wire.send(request_bytes(path, body, self._id, method=method))
        self._expect(await wire.answer(method=method), status)
        self._done(wire)

    # What bad ones do.

    async def leaves_before_the_first_byte(self) -> None:
        is_stream = self._draw.random() < 0.5
        ask, wire = self._ask(stream=is_stream), await self._fresh()
        self._entry.has_left = True
        await wire.send(self._request(ask, ask.streamed() if is_stream else ask.body))
        if self._draw.random() < 0.7:
            await asyncio.sleep(self._draw.uniform(0.0, 0.05))
        self._leave(wire)

    async def leaves_in_the_middle(self) -> None:
        ask, wire = self._ask(stream=True), await self._fresh()
        self._entry.has_left = True
        await wire.send(self._request(ask, ask.streamed()))
        answer = await wire.answer(size=256, most=self._draw.randint(1, 8000))
        if answer.is_whole:
            self._judge(ask, answer)
        elif answer.status == 200 and not is_beginning(join(answer), self.world.alone[ask.number]):
            self._wrong(f"a stream that went wrong: {answer.body[:300]!r}")
        self._leave(wire)

    async def leaves_in_its_body(self) -> None:
        ask, wire = self._ask(), await self._fresh()
        data = self._request(ask, ask.body)
        self._entry.has_left = True
        await wire.send(data[: self._draw.randrange(len(data))])
        if self._draw.random() < 0.3:
            wire.half_close()
            await wire.read()
        self._leave(wire)

    async def sends_nonsense(self) -> None:
        body, wire = self._draw.choice(MALFORMED), await self._kept()
        await wire.send(request_bytes(COMPLETIONS if self._draw.random() < 0.8 else CHAT, body, self._id))
        answer = await wire.answer()
        # A full queue is looked at before what would take work to find wrong.
        self._expect(answer, 429 if answer.status == 429 else 400)
        self._done(wire)

    async def sends_no_http(self) -> None:
        wire = await self._fresh()
        self._entry.has_left = True
        await wire.send(self._draw.choice(NOT_HTTP).replace(b"%b", self._id.encode()))
        wire.half_close()
        answer = b""
        while piece := await wire.read():
            answer += piece
        if answer and not answer.startswith(b"HTTP/1.1 400 "):
            self._wrong(f"answered with {answer[:100]!r}")
        self._drop()

    async def sends_too_much(self) -> None:
        wire, size = await self._fresh(), self.world.max_body_bytes * self._draw.randint(2, 8)
        data = b'{"prompt": "' + b"a" * size + b'"}'
        if self._draw.random() < 0.5:
            whole = request_bytes(COMPLETIONS, data, self._id)
        else:
            head = request_bytes(COMPLETIONS, None, self._id, headers=("Transfer-Encoding: chunked",))
            whole = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        sending = asyncio.create_task(wire.send(whole))
        try:
            self._expect(await wire.answer(), 413)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            self._drop()

    async def reads_slowly(self) -> None:
        ask, wire = self._ask(self.world.long_asks, stream=True), await self._fresh(SMALL_BUFFER)
        await wire.send(self._request(ask, ask.streamed()))
        self._judge(ask, await wire.answer(size=512, pause=self._draw.choice([0.001, 0.01])), may_be_slow=True)
        self._drop()

    async def never_reads(self) -> None:
        ask, wire = self._ask(self.world.long_asks, stream=True), await self._fresh(SMALL_BUFFER)
        self._entry.has_left = True
        await wire.send(self._request(ask, ask.streamed()))
        await self._wait_for_turns(40)
        self._leave(wire)

    def _leave(self, wire: Wire) -> None:
        wire.close(reset=self._draw.random() < 0.5)
        self._wire = None

    # What they may be told.

    def _expect(self, answer: Answer, status: int) -> None:
        self._hear(answer)
        if answer.status != status:
            self._wrong(f"{answer.status} instead of {status}: {answer.body[:300]!r}")
        elif status >= 400:
            error = answer.json()["error"]
            if set(error) != {"message", "type", "param", "code"} or not error["message"]:
                self._wrong(f"an error of another shape: {error}")

    def _hear(self, answer: Answer) -> None:
        self._entry.status = answer.status
        self.world.book.told[str(answer.status)] += 1
        if answer.headers.get("x-request-id") != self._id:
            self._wrong(f"got the answer of {answer.headers.get('x-request-id')}")

    def _judge(self, ask: Ask, answer: Answer, *, may_be_late: bool = False, may_be_slow: bool = False) -> None:
        self._hear(answer)
        whole = self.world.alone[ask.number]
        if answer.status != 200:
            self._judge_error(answer.status, answer.json()["error"], may_be_late=may_be_late)
            return
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        got = join(answer) if is_stream else Streamed(essence(answer.json()), None, True)
        if got.error is not None:
            status = {"request_timeout": 504, "slow_reader": 408}.get(got.error["code"], 500)
            self.world.book.told[f"200, then {status}"] += 1
            self._judge_error(status, got.error, may_be_late=may_be_late, may_be_slow=may_be_slow)
            if not is_beginning(got, whole):
                self._wrong(f"a stream that went wrong: {got.essence}")
        elif not got.is_done or got.essence != whole:
            self._wrong(f"ask {ask.number} got {json.dumps(got.essence)[:2000]} instead of {json.dumps(whole)[:2000]}")
        else:
            self._entry.complete = len(whole["choices"])
            self.world.book.num_equal += 1

    def _judge_error(
        self, status: int, error: dict[str, Any], *, may_be_late: bool = False, may_be_slow: bool = False
    ) -> None:
        is_planted = status == 500 and error["message"] in (FORWARD_FAILED, INJECTED)
        is_late = may_be_late and status == 504 and error["code"] == "request_timeout"
        is_slow = may_be_slow and status == 408
        is_refused = status == 429 and error["code"] == "rate_limit_exceeded"
        if not (is_planted or is_late or is_slow or is_refused):
            self._wrong(f"{status}: {error}")
