"""Requests over a real socket, whole and streamed, and what a caller is told of each."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from millpond.engine.engine import Engine
from millpond.errors import EngineError
from millpond.lab.asking import Ask, Got
from millpond.lab.bits import Place, Told
from millpond.lab.http_client import EventReader, Server, exchange
from millpond.serve.logprobs import CompletionLogprobs, TokenNames, joined, prompt_logprobs
from millpond.serve.run import Running, serve
from millpond.text.tokenizer import Tokenizer

AT_ONCE = 64  # requests of this client that the server has not answered
WHOLE, STREAMED = "whole", "streamed"


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """A server over the engine on a free loopback port, stopped at the end; gives its URL."""
    ready: queue.Queue[Running | BaseException] = queue.Queue()

    def run() -> None:
        try:
            serve(engine, "127.0.0.1", 0, on_ready=ready.put, notify=lambda line: None)
        except BaseException as error:
            ready.put(error)
            raise

    thread = threading.Thread(target=run, name="millpond-server")
    thread.start()
    running = ready.get()
    if isinstance(running, BaseException):
        raise EngineError(f"the server did not start: {running}")
    try:
        yield running.url
    finally:
        running.stop()
        thread.join()


class Heard(NamedTuple):
    """What came of one request: each of its answers, by id. how is WHOLE or STREAMED."""

    request: str
    how: str
    answers: dict[str, Told]


def over_http(engine: Engine, asks: Mapping[str, Ask]) -> list[Heard]:
    """Every request whole and streamed, all in one crowd; those that want the scores of a prompt come whole only.

    Raises EngineError for an answer that is no 200 or does not come to its end.
    """
    jobs = [(name, ask, how) for how in (STREAMED, WHOLE) for name, ask in asks.items()]
    jobs = [job for job in jobs if job[2] is WHOLE or job[1].sampling.prompt_logprobs is None]
    with serving(engine) as url:
        try:
            return asyncio.run(_all(Server.at(url, {}), jobs))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


async def _all(server: Server, jobs: list[tuple[str, Ask, str]]) -> list[Heard]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, ask: Ask, how: str) -> Heard:
        async with room:
            body = await _post(server, {**ask.body(), **({"stream": True} if how is STREAMED else {})})
        choices = _whole(body) if how is WHOLE else _streamed(body)
        return Heard(name, how, {each: _told(choices[index]) for index, each in enumerate(ask.choices(name))})

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*job)) for job in jobs]
    return [task.result() for task in tasks]


async def _post(server: Server, body: dict[str, Any]) -> bytes:
    pieces: list[bytes] = []
    message = server.message("POST", "/v1/completions", json.dumps(body).encode())
    answer = await exchange(server, message, lambda data, now: pieces.append(data))
    try:
        await answer.done
    except asyncio.CancelledError:
        answer.hang_up()
        raise
    await asyncio.sleep(0)  # the connection is closed a turn later
    if answer.status != 200 or not answer.is_whole:
        said = answer.fault or answer.error_body.decode(errors="replace")
        raise EngineError(f"the server answered {answer.status}, {said}")
    return b"".join(pieces)


def _whole(body: bytes) -> dict[int, dict[str, Any]]:
    return {choice["index"]: choice for choice in json.loads(body)["choices"]}


def _streamed(body: bytes) -> dict[int, dict[str, Any]]:
    """The choices of a stream, their pieces joined."""
    *events, done = EventReader().feed(body)
    if done != b"[DONE]":
        raise EngineError(f"a stream ended in {done[:200]!r}")
    choices: dict[int, dict[str, Any]] = {}
    for piece in (choice for event in events for choice in json.loads(event)["choices"]):
        known = choices.setdefault(piece["index"], {"text": "", "logprobs": None})
        known["text"] += piece["text"]
        known["finish_reason"] = piece["finish_reason"]
        if piece["logprobs"] is not None:
            known["logprobs"] = (
                piece["logprobs"] if known["logprobs"] is None else joined(known["logprobs"], piece["logprobs"])
            )
    return choices


def told_over_http(tokenizer: Tokenizer, ask: Ask, got: Got) -> Told:
    """What a caller must be told of an answer whose bits are known."""
    names = TokenNames(tokenizer, ask.sampling.skip_special_tokens)
    scored = ask.sampling.logprobs is not None
    choice: dict[str, Any] = {
        "text": got.text,
        "finish_reason": got.finish_reason and got.finish_reason.value,
        "logprobs": CompletionLogprobs(names).output(got.scores) if scored else None,
    }
    if (num_top := ask.sampling.prompt_logprobs) is not None:
        choice["prompt_logprobs"] = prompt_logprobs(names, got.prompt_scores, num_top)
    return _told(choice)


def _told(choice: Mapping[str, Any]) -> Told:
    shown, prompt = choice.get("logprobs"), choice.get("prompt_logprobs") or [None]
    columns = () if shown is None else (shown["tokens"], shown["token_logprobs"], shown["top_logprobs"])
    output = [Place(token, logprob, tuple(top.items())) for token, logprob, top in zip(*columns, strict=True)]
    scored = [Place(None, None, _entries(each)) for each in prompt[1:]]
    return Told(scored, output, choice["text"], str(choice["finish_reason"]))


def _entries(scores: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((token_id, *each.values()) for token_id, each in scores.items())
