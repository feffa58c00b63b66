"""How long the requests of a workload are, as the command takes it, and the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from millpond.lab.workload import WorkloadRequest, random_prompt


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the requests of a workload are, in tokens: the choices in turn, or each drawn evenly from them."""

    choices: Sequence[int]
    drawn: bool = False

    def __str__(self) -> str:
        """As the command takes it."""
        return f"{self.choices[0]}-{self.choices[-1]}" if self.drawn else ",".join(map(str, self.choices))

    def of(self, num_requests: int, random: Random) -> list[int]:
        if self.drawn:
            return [random.choice(self.choices) for _ in range(num_requests)]
        return [self.choices[index % len(self.choices)] for index in range(num_requests)]


def workload_of(
    num_requests: int, prompt_tokens: Lengths, output_tokens: Lengths, *, vocab_size: int, seed: int
) -> tuple[WorkloadRequest, ...]:
    """Requests that all come at time 0. All prompts' lengths are drawn first, then the outputs', then the tokens."""
    random = Random(seed)
    prompts, outputs = prompt_tokens.of(num_requests, random), output_tokens.of(num_requests, random)
    return tuple(
        WorkloadRequest(0.0, random_prompt(random, prompt, vocab_size), output)
        for prompt, output in zip(prompts, outputs, strict=True)
    )
