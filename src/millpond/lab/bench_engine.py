"""How fast the engine is on this machine: decode, prefill and the mixed workload, through the public Engine.

Prompts are random token ids (new ones for every round; W1's are fixed), and no request stops before its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median
from typing import Protocol

from millpond.core.sampling import SamplingParams
from millpond.core.step import Clock
from millpond.errors import ConfigError, EngineError
from millpond.lab.workload import random_prompt, w1

DECODE_PROMPT_TOKENS = 128
DECODE_STEPS = 64


class Output(Protocol):
    """What the bench reads of an engine's output: the tokens that this step gave one request."""

    @property
    def new_token_ids(self) -> Sequence[int]: ...


class BenchEngine(Protocol):
    """What the bench needs of an Engine."""

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> Sequence[Output]: ...
    @property
    def has_unfinished(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure: decode at these numbers of sequences, prefill of one prompt of these lengths, W1 or not."""

    decode: tuple[int, ...] = (1, 4, 16, 64)
    prefill: tuple[int, ...] = (128, 512, 1024)
    w1: bool = True
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {self.rounds}")

    @property
    def num_measurements(self) -> int:
        return len(self.decode) + len(self.prefill) + self.w1


@dataclass(slots=True)
class BenchResult:
    """Tokens per second: decode by number of sequences, prefill by prompt length, W1's output over the whole run."""

    decode_tok_s: dict[int, float] = field(default_factory=dict)
    prefill_tok_s: dict[int, float] = field(default_factory=dict)
    w1_output_tok_s: float | None = None

    def as_json(self) -> dict[str, object]:
        """What `bench engine --json` prints; a measurement that was not asked for is absent or null."""
        return {
            "decode_tok_s": {str(count): round(speed, 1) for count, speed in self.decode_tok_s.items()},
            "prefill_tok_s": {str(length): round(speed, 1) for length, speed in self.prefill_tok_s.items()},
            "w1_output_tok_s": None if self.w1_output_tok_s is None else round(self.w1_output_tok_s, 1),
        }


@dataclass(slots=True)
class EngineBench:
    """Measures one engine with one clock. Every figure is the median of the plan's rounds, after one that warms up."""

    engine: BenchEngine
    vocab_size: int
    clock: Clock
    seed: int = 0
    decode_steps: int = DECODE_STEPS
    _num_requests: int = 0

    def run(self, plan: BenchPlan, notify: Callable[[str], None]) -> BenchResult:
        """Carry out the plan; notify is called with the name of each measurement before it starts."""
        result = BenchResult()
        for num_sequences in plan.decode:
            notify(f"decode, {num_sequences} sequences")
            result.decode_tok_s[num_sequences] = self._median(plan, partial(self.decode, num_sequences))
        for length in plan.prefill:
            notify(f"prefill, {length} tokens")
            result.prefill_tok_s[length] = self._median(plan, partial(self.prefill, length))
        if plan.w1:
            notify("W1, 64 mixed requests")
            result.w1_output_tok_s = self._median(plan, lambda random: self.w1())
        return result

    def _median(self, plan: BenchPlan, measure: Callable[[Random], float]) -> float:
        random = Random(self.seed)
        measure(random)
        return median(measure(random) for _ in range(plan.rounds))

    def decode(self, num_sequences: int, random: Random) -> float:
        """Tokens per second over the steps in which all the sequences decode, from prompts of 128 tokens.

        A step counts when it and the one before it gave every sequence a token: then nothing of it was prefill.
        Raises EngineError where the pool cannot hold all the sequences.
        """
        ids = [
            self._add(random_prompt(random, DECODE_PROMPT_TOKENS, self.vocab_size), None) for _ in range(num_sequences)
        ]
        seconds: list[float] = []
        all_decode = False
        most = steps_since = 0
        for num_tokens, step_seconds in self._steps():
            most, steps_since = (num_tokens, 0) if num_tokens > most else (most, steps_since + 1)
            # A prompt gets at least a token in a step, so the next sequence decodes in time or waits for the pool.
            if num_tokens != num_sequences and (all_decode or steps_since > DECODE_PROMPT_TOKENS):
                raise EngineError(
                    f"a decode step gave {num_tokens} tokens to {num_sequences} sequences: give the pool more memory "
                    f"(--kv-memory) or measure fewer sequences (--decode)"
                )
            if all_decode:
                seconds.append(step_seconds)
            all_decode = num_tokens == num_sequences
            if len(seconds) == self.decode_steps:
                break
        for request_id in ids:
            self.engine.abort(request_id)
        self._drain()
        return len(seconds) * num_sequences / sum(seconds)

    def prefill(self, length: int, random: Random) -> float:
        """Prompt tokens per second, from handing one prompt over to its first output token."""
        prompt = random_prompt(random, length, self.vocab_size)
        start = self.clock()
        self._add(prompt, 1)
        for num_tokens, _ in self._steps():
            if num_tokens:
                break
        seconds = self.clock() - start
        self._drain()
        return length / seconds

    def w1(self) -> float:
        """Output tokens per second of W1, from its first request handed over to its last token."""
        requests = w1(self.vocab_size, self.seed)
        start = self.clock()
        for each in requests:
            self._add(each.prompt_token_ids, each.max_tokens)
        num_tokens = sum(tokens for tokens, _ in self._steps())
        return num_tokens / (self.clock() - start)

    def _add(self, prompt: Sequence[int], max_tokens: int | None) -> str:
        self._num_requests += 1
        request_id = f"bench-{self._num_requests}"
        self.engine.add_request(
            request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        )
        return request_id

    def _steps(self) -> Iterator[tuple[int, float]]:
        """Each step until nothing is left: how many output tokens it gave, and the seconds it took."""
        while self.engine.has_unfinished:
            before = self.clock()
            outputs = self.engine.step()
            seconds = self.clock() - before
            yield sum(len(output.new_token_ids) for output in outputs), seconds

    def _drain(self) -> None:
        for _ in self._steps():
            pass
