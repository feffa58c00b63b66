"""One request through an engine, piece by piece; what `generate` and `chat` share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from millpond.core.request import FinishReason
from millpond.core.sampling import SamplingParams
from millpond.errors import EngineError

if TYPE_CHECKING:
    from millpond.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: its text, its token ids, and why it ended."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def answer(
    engine: Engine,
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    write: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Run one request to its end, handing each new piece of text to write as it comes.

    stopped is asked between steps; where it says yes the request is aborted and what exists is the answer.
    """
    pieces: list[str] = []
    token_ids: list[int] = []
    reason = FinishReason.ABORT
    engine.add_request(request_id, prompt_token_ids, sampling)
    while engine.has_unfinished:
        if stopped():
            engine.abort(request_id)
        for output in engine.step():
            pieces.append(output.text)
            token_ids.extend(output.new_token_ids)
            reason = output.finish_reason or reason
            if output.text:
                write(output.text)
            if reason is FinishReason.ERROR:
                raise EngineError(output.error or "the request ended with a fault of the engine")
    return Answer("".join(pieces), tuple(token_ids), reason)


def chat_prompt(engine: Engine, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation through the model's chat template. Raises InvalidRequestError where it has none."""
    return engine.tokenizer.encode_chat(engine.chat_template.render(messages))


def write_out(text: str) -> None:
    """Standard output, now."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a flag while a step may be under way, so that it stops an answer and never half a step."""
    seen: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
