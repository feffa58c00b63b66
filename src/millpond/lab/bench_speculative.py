"""What speculative decoding gains and costs: the same questions with guesses and without them, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median

from millpond.core.sampling import SamplingParams
from millpond.core.speculation import Drafter, PromptLookup
from millpond.core.step import Clock
from millpond.engine.engine import Engine
from millpond.errors import ConfigError, EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativePlan:
    """How many requests run at once, how long their answers are, how they are sampled, how often all is repeated."""

    sequences: tuple[int, ...] = (1, 4)
    max_tokens: int = 128
    temperature: float = 0.0
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {self.rounds}")


@dataclass(frozen=True, slots=True)
class SpeculativeRow:
    """One workload at one number of sequences. Speeds are output tokens per second of whole answers, prefill included.

    gain is the median over the rounds of the speed with guesses over the one without. tokens_per_step is how many
    tokens a step with guesses gives a request; drafted and accepted count one round.
    """

    workload: str
    num_sequences: int
    plain_tok_s: float
    guessed_tok_s: float
    gain: float
    tokens_per_step: float
    drafted: int
    accepted: int

    def as_json(self) -> dict[str, object]:
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


@dataclass(slots=True)
class SpeculativeBench:
    """Measures one idle engine, whose runner has room for guesses. prompts: token ids by name of the workload."""

    engine: Engine
    prompts: Mapping[str, Sequence[Sequence[int]]]
    clock: Clock
    _num_requests: int = 0

    def run(self, plan: SpeculativePlan, notify: Callable[[str], None]) -> list[SpeculativeRow]:
        """Carry out the plan; notify is called with the name of each measurement before it starts.

        Raises EngineError where an answer with guesses differs from the one without.
        """
        rows = []
        for workload, prompts in self.prompts.items():
            for num_sequences in plan.sequences:
                notify(f"{workload}, {num_sequences} at once")
                rows.append(self._row(plan, workload, prompts, num_sequences))
        return rows

    def _row(
        self, plan: SpeculativePlan, workload: str, prompts: Sequence[Sequence[int]], num_sequences: int
    ) -> SpeculativeRow:
        drafter, counters = PromptLookup(self.engine.config.speculative_tokens), self.engine.scheduler.counters
        asked = list(islice(cycle(prompts), max(num_sequences, len(prompts))))
        plain, guessed = [], []
        for turn in range(plan.rounds + 1):
            seconds, expected = self._answers(plan, asked, num_sequences, None)
            before = counters.drafted_tokens, counters.accepted_tokens
            guessed_seconds, answers = self._answers(plan, asked, num_sequences, drafter)
            if answers != expected:
                raise EngineError(f"{workload}: an answer with guesses differs from the one without; this is a bug")
            if turn:  # the first one warms up
                plain.append(sum(map(len, answers)) / seconds)
                guessed.append(sum(map(len, answers)) / guessed_seconds)
        num_tokens, accepted = sum(map(len, answers)), counters.accepted_tokens - before[1]
        return SpeculativeRow(
            workload=workload,
            num_sequences=num_sequences,
            plain_tok_s=median(plain),
            guessed_tok_s=median(guessed),
            gain=median(with_it / without for with_it, without in zip(guessed, plain, strict=True)),
            tokens_per_step=num_tokens / (num_tokens - accepted),
            drafted=counters.drafted_tokens - before[0],
            accepted=accepted,
        )

    def _answers(
        self, plan: SpeculativePlan, asked: Sequence[Sequence[int]], num_sequences: int, drafter: Drafter | None
    ) -> tuple[float, list[list[int]]]:
        """Seconds and answers of all the prompts, num_sequences of them at once."""
        self.engine.scheduler.drafter = drafter
        answers: dict[str, list[int]] = {}
        start = self.clock()
        for first in range(0, len(asked), num_sequences):
            for seed, prompt in enumerate(asked[first : first + num_sequences], first):
                self._num_requests += 1
                sampling = SamplingParams(max_tokens=plan.max_tokens, temperature=plan.temperature, seed=seed)
                answers[name := f"bench-{self._num_requests}"] = []
                self.engine.add_request(name, prompt, sampling)
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    answers[output.request_id] += output.new_token_ids
        return self.clock() - start, list(answers.values())
