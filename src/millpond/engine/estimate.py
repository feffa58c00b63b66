"""How long an answer will take at the least, by what was measured; what was not measured counts as nothing."""

from __future__ import annotations

from typing import NamedTuple

from millpond.core.pace import StepPrices


class Estimate(NamedTuple):
    """Seconds until an answer is complete, in three parts. num_tokens is how long it is taken to be."""

    waiting: float
    prompt: float
    answer: float
    num_tokens: float

    @property
    def seconds(self) -> float:
        return self.waiting + self.prompt + self.answer

    def __str__(self) -> str:
        waiting, prompt, answer = (round(1000 * part) for part in self[:3])
        return (
            f"by what was measured it takes {1000 * self.seconds:.0f} ms, of which it waits {waiting}, "
            f"the prompt takes {prompt}, and an answer of about {self.num_tokens:.0f} tokens {answer}"
        )


def estimate(
    prices: StepPrices,
    waiting: float,
    num_prompt_tokens: float,
    num_tokens: float,
    *,
    num_running: int,
    tokens_a_step: float,
) -> Estimate:
    """Of an answer of num_tokens beside so many others, where a request gets so many tokens a step."""
    answer = max(0.0, num_tokens - 1) / tokens_a_step * prices.decode_seconds(num_running + 1)
    return Estimate(waiting, num_prompt_tokens * prices.token_seconds, answer, num_tokens)
