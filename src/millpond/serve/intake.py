"""From the text of a request to token ids, with the event loop kept free and bounds before any work."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from millpond.engine.limits import RequestLimits
from millpond.errors import InvalidRequestError
from millpond.serve.protocol import ChatMessage, Conversation, Prompt
from millpond.text.chat import ChatTemplate
from millpond.text.checks import check_prompt_text, check_unicode
from millpond.text.tokenizer import Tokenizer

T = TypeVar("T")

# Below this a tokenizer is done in about a millisecond, less than the way to another thread and back costs.
INLINE_CHARACTERS = 4096
# A message takes the template some time, however short it is.
MESSAGE_CHARACTERS = 50
# What telling a log probability takes, in the same measure.
SCORE_CHARACTERS = 10
# An encoder's tokenizer drops spaces and accents and makes a long word one token: so many are read for each.
ENCODERS_TOKEN = 1000


@dataclass(frozen=True, slots=True)
class Intake:
    """longest_token is in characters; max_characters bounds one prompt: with more, none is taken to fit the context."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    longest_token: int
    max_characters: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_template: ChatTemplate, limits: RequestLimits) -> Intake:
        longest = max(map(len, tokenizer.vocabulary.tokens)) if limits.generates else ENCODERS_TOKEN
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

        def encode_one(name: str, prompt: Prompt) -> list[int]:
            if not isinstance(prompt, str):
                return prompt
            check_prompt_text(prompt, name)
            return self.tokenizer.encode(prompt)

        def encode() -> list[list[int]]:
            return list(map(encode_one, prompt_names(len(prompts)), prompts))

        return await off_loop(encode, sum(len(prompt) for prompt in prompts if isinstance(prompt, str)))

    async def tokens_of(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that is no prompt yet. Raises InvalidRequestError."""
        self._check_length(len(text), "prompt")

        def encode() -> list[int]:
            check_unicode(text, "prompt")
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await off_loop(encode, len(text))

    async def texts(self, prompts: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """The texts of prompts, the same whether they came as text or as ids."""

        def decode() -> list[str]:
            return [self.tokenizer.decode(each, skip_special_tokens=skip_special_tokens) for each in prompts]

        return await off_loop(decode, sum(map(len, prompts)))

    async def chat(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequestError, with the template's own words where it objects.

        Who is cancelled here leaves a thread behind only until the template's next step.
        """
        messages, variables = conversation.messages, conversation.chat_template_kwargs or {}
        num_characters = self._check_messages(messages)
        if variables:
            num_characters += len(json.dumps(variables))
            self._check_length(num_characters, "chat_template_kwargs")

        is_over = threading.Event()

        def render_and_encode() -> list[int]:
            for index, message in enumerate(messages):
                check_prompt_text(message.content, f"messages[{index}].content")
            text = self.chat_template.render(
                [message.as_template_sees_it() for message in messages],
                is_over.is_set,
                add_generation_prompt=conversation.add_generation_prompt is not False,
                continue_final_message=bool(conversation.continue_final_message),
                **variables,
            )
            # What else goes into a template: names, the arguments of calls, its variables.
            check_prompt_text(text, "messages")
            return self.tokenizer.encode_chat(text)

        work = num_characters + MESSAGE_CHARACTERS * len(messages)
        try:
            return await off_loop(render_and_encode, work, is_cheap=self.chat_template.is_cheap)
        finally:
            is_over.set()

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self.max_characters:
            raise InvalidRequestError(
                f"{param} has {num_characters} characters, and at most {self.max_characters} are read for this "
                "context; shorten it",
                param,
            )


def prompt_names(count: int) -> list[str]:
    """What an error calls each of the prompts."""
    return ["prompt"] if count == 1 else [f"prompt[{index}]" for index in range(count)]


async def off_loop(work: Callable[[], T], num_characters: int, *, is_cheap: bool = True) -> T:
    """What work gives; in a thread where it takes longer than the way to one, by the characters of its text."""
    return work() if is_cheap and num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
