"""What an OpenAI-compatible server understands, found out by asking: its model, token ids, usage in streams, its words.

The requests that find out are a warm-up as well, and count nowhere.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from millpond.errors import EngineError
from millpond.lab.http_client import Server, exchange
from millpond.lab.load_client import SHOWN, LoadClient, LoadRecord, LoadRequest
from millpond.lab.load_plan import LoadPlan

# Ordinary tokens in every large vocabulary: special tokens and single bytes are below or far above.
TOKEN_IDS = range(1000, 8000)
# Nearly every tokenizer has each word of this as one token, with the space in front.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = _TEXT.split()
FEW, MANY = 8, 40  # words of the two prompts that tell how many tokens a word has
REFUSED = (400, 404, 415, 422, 500, 501)  # what a server may answer to a field that it does not know
MOST_MODELS_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How requests to a server are written.

    A text of n words is taken for n * tokens_per_word + extra_tokens tokens (a chat template adds its own).
    """

    model: str
    is_chat: bool = False
    ignore_eos: bool = False
    takes_ids: bool = True
    has_usage: bool = True
    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0

    def units(self, num_tokens: int, *, is_start: bool = True) -> int:
        """How many token ids or words make about num_tokens tokens, of which is_start brings the extra ones."""
        if self.takes_ids:
            return num_tokens
        extra = self.extra_tokens if is_start else 0.0
        return max(1, round((num_tokens - extra) / self.tokens_per_word))

    def draw(self, num_units: int, random: Random) -> list[Any]:
        """Token ids, or words."""
        return random.choices(TOKEN_IDS if self.takes_ids else WORDS, k=num_units)

    def body(self, units: list[Any], max_tokens: int) -> bytes:
        """A greedy, streamed completion of the units."""
        prompt = units if self.takes_ids else " ".join(units)
        fields: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        fields |= {"max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        if self.has_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields, separators=(",", ":")).encode()


async def find_dialect(server: Server, plan: LoadPlan) -> Dialect:
    """Ask the server. Raises EngineError with its words where it answers no request."""
    model = await _first_model(server, plan.timeout) if plan.model is None else plan.model
    client = LoadClient(server, plan.route, plan.timeout)
    plain = Dialect(model=model, is_chat=plan.endpoint == "chat", ignore_eos=plan.ignore_eos)
    ids_are_tokens = True
    for dialect in _candidates(plain, plan.prompts):
        if dialect.takes_ids and not ids_are_tokens:
            continue
        record = await _ask(client, dialect, FEW)
        ids_are_tokens = _counts_ids(dialect, record)
        if record.is_ok and ids_are_tokens:
            dialect = replace(dialect, has_usage=record.usage is not None)
            return dialect if dialect.takes_ids else await _with_measured_words(client, dialect, record)
        if not record.is_ok and record.error not in [f"http_{status}" for status in REFUSED]:
            break
    said = record.message or "an answer that does not count token ids as tokens"
    raise EngineError(f"the server at {server.host} answered a first request with {record.error or 'success'}: {said}")


def _candidates(plain: Dialect, prompts: str) -> Iterator[Dialect]:
    """From the most that a server may understand to the least."""
    choices = {"auto": (True, False), "ids": (True,), "text": (False,)}
    for takes_ids in choices["text" if plain.is_chat else prompts]:
        for has_usage in (True, False):
            yield replace(plain, takes_ids=takes_ids, has_usage=has_usage)


def _counts_ids(dialect: Dialect, record: LoadRecord) -> bool:
    """A server might take a list of numbers for text: then its usage counts others. One may be a token that it adds."""
    return not dialect.takes_ids or record.usage is None or abs(record.usage["prompt_tokens"] - FEW) <= 1


async def _ask(client: LoadClient, dialect: Dialect, num_units: int) -> LoadRecord:
    units = dialect.draw(num_units, Random(num_units))
    if dialect.takes_ids:
        units[-1] = TOKEN_IDS[-1]  # the largest that may be drawn later
    request = LoadRequest(0.0, num_units, 1, dialect.body(units, 1))
    return await client.send(0, request, 0.0, asyncio.get_running_loop().time())


async def _with_measured_words(client: LoadClient, dialect: Dialect, few: LoadRecord) -> Dialect:
    """By two prompts of different lengths, or by the one where the longer does not fit."""
    if few.usage is None:
        return dialect
    many = await _ask(client, dialect, MANY)
    if not many.is_ok or many.usage is None:
        return replace(dialect, tokens_per_word=max(1, few.usage["prompt_tokens"]) / FEW)
    slope = (many.usage["prompt_tokens"] - few.usage["prompt_tokens"]) / (MANY - FEW)
    if slope <= 0.0:
        return dialect
    return replace(dialect, tokens_per_word=slope, extra_tokens=few.usage["prompt_tokens"] - slope * FEW)


async def _first_model(server: Server, timeout: float) -> str:
    body = array("B")
    try:
        async with asyncio.timeout(timeout):
            over = await exchange(server, server.message("GET", "/v1/models"), lambda data, now: _keep(body, data))
            await over.done
    except OSError as error:
        raise EngineError(f"no answer from {server.host}, port {server.port}: {error or 'timeout'}") from error
    if over.status != 200 or not over.is_whole:
        said = over.error_body.decode(errors="replace") or over.fault
        raise EngineError(f"/v1/models answered with status {over.status}: {said}; name a --model")
    try:
        return str(json.loads(body.tobytes())["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        said = body.tobytes()[:SHOWN].decode(errors="replace")
        raise EngineError(f"/v1/models names no model: {said!r}; name a --model") from None


def _keep(body: array[int], data: bytes) -> None:
    if len(body) < MOST_MODELS_BYTES:
        body.frombytes(data)
