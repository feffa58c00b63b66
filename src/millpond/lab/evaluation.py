"""How well a model predicts a text: windows of it, scored as prompts through the engine, and what follows from that.

Windows and figures are those of llama.cpp's perplexity tool, so that they compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millpond.core.request import FinishReason
from millpond.core.sampling import SamplingParams
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.errors import ConfigError, EngineError, InvalidRequestError
from millpond.text.tokenizer import Tokenizer

LEAST_CONTEXT = 4
SCORED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """How a text is cut: windows of `context` tokens.

    Without a stride they lie side by side, and of each the tokens behind its middle and the next count: those
    have half a window before them. With one, a window begins every `stride` tokens and its last `stride` count, so that
    every token of the text counts once, but for the first. num_windows, where given, is the most that are looked at.
    """

    context: int = 512
    stride: int | None = None
    num_windows: int | None = None

    def __post_init__(self) -> None:
        if self.context < LEAST_CONTEXT:
            raise ConfigError(f"a window has at least {LEAST_CONTEXT} tokens, got a context of {self.context}")
        if self.stride is not None and not 1 <= self.stride < self.context:
            raise ConfigError(f"stride must be from 1 to {self.context - 1} for a context of {self.context}")
        if self.num_windows is not None and self.num_windows < 1:
            raise ConfigError(f"at least 1 window must be looked at, got {self.num_windows}")

    @property
    def counted(self) -> range:
        """The places of a window whose tokens count."""
        first = self.context // 2 + 1 if self.stride is None else self.context - self.stride
        return range(first, self.context)

    def cut(self, token_ids: Sequence[int]) -> list[list[int]]:
        """The windows of a text, which leave out its end. Raises InvalidRequestError where there is none."""
        step, length = self.stride or self.context, len(token_ids)
        if length < self.context:
            raise InvalidRequestError(
                f"the text has {length} tokens, fewer than one window of {self.context}: "
                "take a longer text or a smaller context"
            )
        starts = range(0, length - self.context + 1, step)[: self.num_windows]
        return [list(token_ids[start : start + self.context]) for start in starts]


def text_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text from its beginning, without an end."""
    begin, token_ids = list(tokenizer.source.begin), tokenizer.encode(text, add_special_tokens=False)
    return token_ids if token_ids[: len(begin)] == begin else [*begin, *token_ids]


def score_windows(
    engine: Engine,
    windows: Sequence[Sequence[int]],
    counted: range,
    notify: Callable[[int], None] = lambda num_done: None,
) -> list[list[float]]:
    """The log probabilities of each window's tokens at the places `counted`, all windows through an idle engine.

    Where the model's texts begin with BOS, so does a window, in place of its first token. A window's request has its
    number for an id. notify is told how many are done. Raises ConfigError for windows that have no room, EngineError
    where a request fails.
    """
    check_room(len(windows[0]), engine.limits.max_total_tokens)
    begin = engine.tokenizer.source.begin
    prompts = {str(number): [*begin, *window[len(begin) :]] for number, window in enumerate(windows)}
    found: dict[str, list[float]] = {}
    try:
        for output in _run(engine, prompts):
            if output.finish_reason is FinishReason.ERROR or output.prompt_scores is None:
                raise EngineError(f"window {output.request_id} of {len(windows)} could not be scored: {output.error}")
            # A score's index is its token's, less one: the first token has none.
            found[output.request_id] = [output.prompt_scores[place - 1].logprob for place in counted]
            notify(len(found))
    except BaseException:
        engine.abort_all()
        raise
    return [found[name] for name in prompts]


def check_room(context: int, max_total_tokens: int) -> None:
    """Raise ConfigError for a window that does not fit into so many tokens with the one that is generated behind it."""
    most = max_total_tokens - 1
    if context > most:
        raise ConfigError(
            f"a window of {context} tokens and the one that is generated behind it have no room: the context can be at "
            f"most {most}"
        )


def _run(engine: Engine, prompts: dict[str, list[int]]) -> Iterator[RequestOutput]:
    """What each got. No more are in the engine than have slots."""
    coming = list(prompts.items())[::-1]
    while coming or engine.has_unfinished:
        while coming and len(engine.unfinished_ids) < engine.config.max_num_seqs:
            engine.add_request(*coming.pop(), SCORED)
        yield from engine.step()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        count = len(values)
        mean = math.fsum(values) / count
        variance = math.fsum((value - mean) ** 2 for value in values) / count
        return cls(mean, math.sqrt(variance / (count - 1)) if count > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log probability of the tokens that count, and its standard error.
    Both are infinite where no float64 holds them."""

    perplexity: float
    error: float
    num_tokens: int

    @classmethod
    def of(cls, logprobs: Sequence[float]) -> Perplexity:
        surprise = Estimate.of([-logprob for logprob in logprobs])
        try:
            perplexity = math.exp(surprise.mean)
        except OverflowError:
            return cls(math.inf, math.inf, len(logprobs))
        return cls(perplexity, surprise.error * perplexity, len(logprobs))
