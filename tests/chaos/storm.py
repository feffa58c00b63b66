"""The whole of it: start a server, learn what each ask gets alone, let the clients loose, and look what is left."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from chaos.asks import COMPLETIONS, Ask, essence, make_asks
from chaos.clients import BOUND_SECONDS, Book, Client, World
from chaos.server import Setup, main
from chaos.wire import Wire, request_bytes
from millpond.config import LoadLimits
from tiny_llama import write_tiny_llama

NUM_CLIENTS = 32
NUM_ASKS = 40
FAULTY_SHARE = 0.01
MAX_BODY_BYTES = 1 << 16
SAMPLE_EVERY = 25  # requests
MAX_MODEL_LEN = 320
# 24 blocks are 384 tokens for 8 slots: requests of up to 320 tokens are preempted all the time.
SIZES = {"num_blocks": 24, "max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": MAX_MODEL_LEN}
LOAD = LoadLimits(max_waiting_requests=8, max_waiting_tokens=2000, max_unread_outputs=64)


@dataclass(slots=True)
class Report:
    """figures are the server's own counts; access the statuses of its log by request id; rss in bytes, in order."""

    book: Book
    figures: dict[str, Any]
    leftovers: dict[str, Any]
    access: dict[str | None, list[int]]
    rss: list[int]
    seconds: float
    num_alone_choices: int
    is_stopped: bool = False
    kinds: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = Counter(entry.kind for entry in self.book.entries.values())

    @property
    def growth(self) -> int:
        """Bytes by which the median memory of the second half is above that of the first."""
        middle = len(self.rss) // 2
        return int(statistics.median(self.rss[middle:]) - statistics.median(self.rss[:middle]))

    def disagreements(self) -> list[str]:
        """Where the clients' book and the server's counts contradict each other."""
        found = []
        for request_id, entry in self.book.entries.items():
            lines = self.access.get(request_id, [])
            if entry.status is not None and lines != [entry.status]:
                found.append(f"{request_id} ({entry.kind}) heard {entry.status}, the server logged {lines}")
            if len(lines) > 1:
                found.append(f"{request_id} ({entry.kind}) was logged {len(lines)} times: {lines}")
            if entry.status is None and not entry.has_left:
                found.append(f"{request_id} ({entry.kind}) was lost")
        for request_id in self.access.keys() - self.book.entries.keys():
            found.append(f"the server logged {self.access[request_id]} for {request_id}, which nobody sent")
        return found + self._miscounts()

    def _miscounts(self) -> list[str]:
        found, finished = [], self.figures["finished"]
        if sum(finished.values()) != self.figures["arrivals"]:
            found.append(f"the engine took {self.figures['arrivals']} requests and ended {finished}")
        complete = self.num_alone_choices + sum(entry.complete for entry in self.book.entries.values())
        most = complete + sum(entry.choices - entry.complete for entry in self.book.entries.values())
        ended = finished["stop"] + finished["length"]
        if not complete <= ended <= most:
            found.append(f"the engine completed {ended} answers, the clients saw {complete} of at most {most}")
        return found

    def lines(self) -> list[str]:
        book, figures = self.book, self.figures
        rss = [each / 2**20 for each in self.rss]
        return [
            f"{len(book.entries)} requests of {NUM_CLIENTS} clients in {self.seconds:.1f} s: {dict(self.kinds)}",
            f"answers: {dict(book.told)}; {book.num_equal} equal to the one alone",
            f"engine: {figures['arrivals']} requests, ended {figures['finished']}",
            f"{figures['steps']} steps, {figures['audits']} audited, {figures['preemptions']} preemptions, "
            f"{figures['hit_tokens']} tokens found in the prefix cache, planted {figures['planted']}",
            f"{figures['slow_readers']} slow readers ended",
            f"memory: {min(rss):.1f} to {max(rss):.1f} MiB, second half {self.growth / 2**20:+.2f} MiB",
            f"left: {self.leftovers or 'nothing'}",
            f"wrong: {len(book.wrong)}; the two books disagree: {len(self.disagreements())}",
        ]


def long_asks(first: int) -> list[Ask]:
    """Answers of many bytes, for those who read them slowly."""
    rest = {"max_tokens": 250, "logprobs": 20, "ignore_eos": True}
    return [Ask(first + each, COMPLETIONS, {"prompt": "ab" * (1 + each), "seed": each, **rest}) for each in range(3)]


def run_storm(folder: Path, seed: int, *, requests: int | None = None, seconds: float | None = None) -> Report:
    """Chaos of so many requests, or of so many seconds. Everything that is drawn is drawn from the seed."""
    write_tiny_llama(folder / "tiny.gguf", types={"*": "Q4_1"}, head_dim=32, tied=False, seed=3)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    setup = Setup(folder / "tiny.gguf", seed, SIZES, LOAD, MAX_BODY_BYTES)
    process = context.Process(target=main, args=(other, setup), daemon=True)
    process.start()
    other.close()
    try:
        address = pipe.recv()
        report = asyncio.run(_storm(pipe, address, seed, requests, seconds))
        pipe.send("stop")
        report.is_stopped = pipe.recv() == "stopped"
        process.join(BOUND_SECONDS)
        report.is_stopped &= process.exitcode == 0
        return report
    finally:
        process.kill()
        process.join()


async def _storm(
    pipe: Connection, address: tuple[str, int], seed: int, requests: int | None, seconds: float | None
) -> Report:
    asks = make_asks(NUM_ASKS, seed, MAX_MODEL_LEN - 100)
    slow = long_asks(NUM_ASKS)
    book = Book()
    alone = await _answers_alone(address, [*asks, *slow])
    await _told(pipe, "sample")  # the book begins here
    await _told(pipe, FAULTY_SHARE)
    started = time.monotonic()

    def goes_on() -> bool:
        if requests is not None:
            return len(book.entries) < requests
        return time.monotonic() - started < seconds

    world = World(address, asks, slow, alone, MAX_BODY_BYTES, book, goes_on)
    access: dict[str | None, list[int]] = {}
    rss: list[int] = []
    watching = asyncio.create_task(_watch(pipe, world, access, rss))
    await asyncio.gather(*(Client(world, number, seed).run() for number in range(NUM_CLIENTS)))
    ended = time.monotonic() - started
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await _told(pipe, 0.0)
    leftovers = await _quiet(pipe)
    _note(await _told(pipe, "sample"), access, rss)
    figures = await _told(pipe, "figures")
    num_alone = sum(len(each["choices"]) for each in alone.values())
    return Report(book, figures, leftovers, access, rss, ended, num_alone)


async def _answers_alone(address: tuple[str, int], asks: list[Ask]) -> dict[int, dict[str, Any]]:
    """What each ask gets when nobody else is there, and nothing of it can be found in the prefix cache."""
    answers, wire = {}, Wire(address)
    await wire.open()
    for ask in asks:
        await wire.send(request_bytes(ask.path, {**ask.body, "cache_salt": str(ask.number)}, "alone"))
        answer = await wire.answer()
        assert answer.status == 200, answer.body
        answers[ask.number] = essence(answer.json())
        wire.can_ask_again()
    wire.close()
    return answers


async def _told(pipe: Connection, asked: str | float) -> Any:
    """What the server's inside says to that, with the event loop free meanwhile. One at a time."""
    pipe.send(asked)
    return await asyncio.to_thread(pipe.recv)


async def _watch(pipe: Connection, world: World, access: dict[str | None, list[int]], rss: list[int]) -> None:
    """Sample the server every so many requests."""
    due = 0
    while True:
        await world.turned.wait()
        if len(world.book.entries) >= due:
            due = len(world.book.entries) + SAMPLE_EVERY
            _note(await asyncio.shield(_told(pipe, "sample")), access, rss)


def _note(sample: dict[str, Any], access: dict[str | None, list[int]], rss: list[int]) -> None:
    rss.append(sample["rss"])
    for request_id, status in sample["access"]:
        access.setdefault(request_id, []).append(status)


async def _quiet(pipe: Connection) -> dict[str, Any]:
    """What is left once nobody asks any more: looked at until it is nothing, or until the bound."""
    bound = time.monotonic() + BOUND_SECONDS / 4
    while (left := await _told(pipe, "leftovers")) and time.monotonic() < bound:
        await asyncio.sleep(0.05)
    return left
