"""What can be known of a request before it enters: numbers that never change, so any thread may check them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.core.request import SamplingParams
from millpond.core.scheduler import Scheduler
from millpond.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """vocab_size bounds token ids; max_total_tokens bounds prompt and answer together.

    pool_binds says that the total is set by the K/V pool and not by max_model_len.
    """

    vocab_size: int
    max_total_tokens: int
    pool_binds: bool = False

    @classmethod
    def of(cls, scheduler: Scheduler, vocab_size: int) -> RequestLimits:
        """The limits that the scheduler's door keeps, as numbers."""
        total = 1 + scheduler.max_tokens_that_fit(1)
        # The last token needs no K/V, so the pool carries one more than it holds.
        return cls(vocab_size, total, total == scheduler.pool.num_blocks * scheduler.block_size + 1)

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """The max_tokens that the request runs with. Raises InvalidRequestError with the limit and both numbers."""
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty: it holds no token", "prompt")
        self._check_ids(prompt_token_ids, "prompt")
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        return self._max_tokens(len(prompt_token_ids), sampling.max_tokens)

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        # map, min and max run in C: a long prompt is checked without a loop in Python.
        if strange := set(map(type, token_ids)) - {int}:
            bad = next(each for each in token_ids if type(each) in strange)
            raise InvalidRequestError(f"{param} must hold token ids, which are whole numbers; got {bad!r}", param)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            outside = next(each for each in token_ids if not 0 <= each < self.vocab_size)
            raise InvalidRequestError(
                f"{param} holds token id {outside}, but ids run from 0 to {self.vocab_size - 1}", param
            )

    def _max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        room = self.max_total_tokens - num_prompt_tokens
        if room < 0:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, which is more than {self._limit()}", "prompt"
            )
        if room == 0:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens and leaves no room for one new token: "
                f"prompt and answer together may have {self._limit()}",
                "prompt",
            )
        if max_tokens is not None and max_tokens > room:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens asks for {max_tokens}, together "
                f"{num_prompt_tokens + max_tokens}, which is more than {self._limit()}; "
                f"at most {room} fit after this prompt",
                "max_tokens",
            )
        return room if max_tokens is None else max_tokens

    def _limit(self) -> str:
        source = "all that the K/V pool holds" if self.pool_binds else "the context length"
        return f"{self.max_total_tokens} tokens ({source})"
