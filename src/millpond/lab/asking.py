"""Requests, the loop that runs them, and what each got: everything that must not depend on who else was there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from millpond.core.request import FinishReason
from millpond.core.sampling import SamplingParams
from millpond.core.step import TokenScore
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.errors import EngineError

ARRIVALS = (0, 0, 1, 1, 2, 5)  # requests that come before a step, where they do not all come at once


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for n answers: its prompt, how to sample, what is special about it, and its place with a policy."""

    prompt: Sequence[int]
    sampling: SamplingParams
    kind: str = ""
    priority: int = 0
    tenant: str = ""

    def choices(self, name: str) -> dict[str, SamplingParams]:
        """The engine's requests for its answers, by id."""
        choices = self.sampling.choices()
        return {name if index == 0 else f"{name}-{index}": each for index, each in enumerate(choices)}

    def body(self) -> dict[str, Any]:
        """The fields of the same request over HTTP."""
        given = {each.name: getattr(self.sampling, each.name) for each in dataclasses.fields(self.sampling)}
        defaults = SamplingParams()
        fields = {name: value for name, value in given.items() if value != getattr(defaults, name)}
        if self.sampling.biases:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.sampling.biases}
        return {"prompt": list(self.prompt), "max_tokens": self.sampling.max_tokens, **fields}


@dataclass(slots=True)
class Got:
    """One answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.new_token_ids
        self.text += output.text
        self.finish_reason = output.finish_reason
        self.scores += output.scores
        self.prompt_scores += output.prompt_scores or ()
        self.error = output.error


def drive(
    engine: Engine,
    asks: Mapping[str, Ask],
    *,
    max_steps: int = 1000,
    arrivals: Random | None = None,
    before_step: Callable[[bool], None] = lambda more_to_come: None,
) -> dict[str, Got]:
    """Put the requests in, in order, and step until nothing is left.

    They come all at once, or a few before each step as `arrivals` draws. before_step is told whether there are more to
    come; outputs of requests that it adds are passed over. Raises EngineError after max_steps.
    """
    coming = [(*each, ask) for name, ask in asks.items() for each in ask.choices(name).items()]
    got = {name: Got() for name, _, _ in coming}
    coming.reverse()
    for _ in range(max_steps):
        for _ in range(min(len(coming), len(coming) if arrivals is None else arrivals.choice(ARRIVALS))):
            name, sampling, ask = coming.pop()
            engine.add_request(name, ask.prompt, sampling, priority=ask.priority, tenant=ask.tenant)
        before_step(bool(coming))
        if engine.has_unfinished:
            for output in engine.step():
                if output.request_id in got:
                    got[output.request_id].add(output)
        elif not coming:
            return got
    raise EngineError(f"not drained after {max_steps} steps: {len(engine.unfinished_ids)} requests are unfinished")
