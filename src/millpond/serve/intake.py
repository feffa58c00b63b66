"""From the text of a request to token ids, with the event loop kept free and bounds before any work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from millpond.engine.limits import RequestLimits
from millpond.errors import InvalidRequestError
from millpond.serve.protocol import ChatMessage, Prompt
from millpond.text.chat import ChatTemplate
from millpond.text.tokenizer import Tokenizer

T = TypeVar("T")

# Below this a tokenizer is done in about a millisecond, less than the way to another thread and back costs.
INLINE_CHARACTERS = 4096
# A message takes the template some time, however short it is.
MESSAGE_CHARACTERS = 50


@dataclass(frozen=True, slots=True)
class Intake:
    """longest_token is in characters; max_characters bounds one prompt: with more, none could fit the context."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    longest_token: int
    max_characters: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_template: ChatTemplate, limits: RequestLimits) -> Intake:
        longest = max(map(len, tokenizer.vocabulary.tokens))
        return cls(tokenizer, chat_template, longest, limits.max_total_tokens * longest)

    def least_tokens(self, prompts: Sequence[Prompt]) -> int:
        """What prompts have together at the least, without tokenizing. InvalidRequestError for what never fits."""
        self._check_prompts(prompts)
        return sum(self._least(len(each)) if isinstance(each, str) else len(each) for each in prompts)

    def least_chat_tokens(self, messages: Sequence[ChatMessage]) -> int:
        """The same for a conversation."""
        return self._least(self._check_messages(messages))

    def _least(self, num_characters: int) -> int:
        return -(-num_characters // self.longest_token)

    def _check_prompts(self, prompts: Sequence[Prompt]) -> None:
        for name, prompt in zip(prompt_names(len(prompts)), prompts, strict=True):
            if isinstance(prompt, str):
                self._check_length(len(prompt), name)

    def _check_messages(self, messages: Sequence[ChatMessage]) -> int:
        num_characters = sum(len(message.content) for message in messages)
        self._check_length(num_characters, "messages")
        return num_characters

    async def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt; text gets the model's special tokens. Raises InvalidRequestError."""
        self._check_prompts(prompts)

        def encode() -> list[list[int]]:
            return [self.tokenizer.encode(each) if isinstance(each, str) else each for each in prompts]

        return await _off_loop(encode, sum(len(prompt) for prompt in prompts if isinstance(prompt, str)))

    async def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequestError, with the template's own words where it objects."""
        num_characters = self._check_messages(messages)

        def render_and_encode() -> list[int]:
            text = self.chat_template.render([message.model_dump(exclude_none=True) for message in messages])
            # The template writes the special tokens itself.
            return self.tokenizer.encode(text, add_special_tokens=False)

        work = num_characters + MESSAGE_CHARACTERS * len(messages)
        return await _off_loop(render_and_encode, work, is_cheap=self.chat_template.is_cheap)

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self.max_characters:
            raise InvalidRequestError(
                f"{param} has {num_characters} characters; even at the longest tokens at most "
                f"{self.max_characters} fit the context",
                param,
            )


def prompt_names(count: int) -> list[str]:
    """What an error calls each of the prompts."""
    return ["prompt"] if count == 1 else [f"prompt[{index}]" for index in range(count)]


async def _off_loop(work: Callable[[], T], num_characters: int, *, is_cheap: bool = True) -> T:
    return work() if is_cheap and num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
