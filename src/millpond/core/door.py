"""The door: what could never run alone in an empty pool is refused, and passing it is a promise to run."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.block_pool import blocks_for_length
from millpond.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Door:
    """The sizes that decide whether a request can run at all.

    max_model_len bounds prompt and output together. The pool bounds what needs K/V, which is one token less:
    the last token is delivered and never put through the model. Where prompts are whole (scheduler.py) it stands for
    what the prompt gives, and takes nothing of max_model_len either.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    whole_prompts: bool = False

    @property
    def most_tokens(self) -> int:
        """The most that prompt and output may have together."""
        return self.max_model_len + self.whole_prompts

    def max_tokens_that_fit(self, num_prompt_tokens: int) -> int:
        """The most output tokens a prompt of this length may ask for; 0 when the prompt itself does not fit."""
        by_pool = self.num_blocks * self.block_size + 1 - num_prompt_tokens
        return max(0, min(self.most_tokens - num_prompt_tokens, by_pool))

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise InvalidRequestError, with both numbers, for a request that could never run."""
        self._check_prompt(num_prompt_tokens)
        if self.whole_prompts and max_tokens != 1:
            raise InvalidRequestError(f"max_tokens must be 1 where prompts are whole, got {max_tokens}", "max_tokens")
        if max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {max_tokens}", "max_tokens")
        self._check_total(num_prompt_tokens, max_tokens)

    def _check_prompt(self, length: int) -> None:
        if length < 1:
            raise InvalidRequestError("the prompt is empty: it must have at least 1 token", "prompt")
        if length > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {length} tokens, more than max_model_len {self.max_model_len}; shorten it", "prompt"
            )
        if length == self.most_tokens:
            raise InvalidRequestError(
                f"the prompt has {length} tokens, which leaves no room for one new token within "
                f"max_model_len {self.max_model_len}; shorten it by at least 1",
                "prompt",
            )
        if blocks_for_length(length, self.block_size) > self.num_blocks:
            raise InvalidRequestError(f"the prompt has {length} tokens: {self._blocks(length)}; shorten it", "prompt")

    def _check_total(self, num_prompt_tokens: int, max_tokens: int) -> None:
        total = num_prompt_tokens + max_tokens
        asked = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}"
        remedy = f"max_tokens can be at most {self.max_tokens_that_fit(num_prompt_tokens)} for this prompt"
        if total > self.most_tokens:
            raise InvalidRequestError(
                f"{asked}: together {total}, more than max_model_len {self.max_model_len}; {remedy}", "max_tokens"
            )
        if blocks_for_length(total - 1, self.block_size) > self.num_blocks:
            raise InvalidRequestError(f"{asked}: {self._blocks(total - 1)}; {remedy}", "max_tokens")

    def _blocks(self, length: int) -> str:
        need = blocks_for_length(length, self.block_size)
        return f"that needs {need} blocks of {self.block_size} tokens and the pool has {self.num_blocks}"
