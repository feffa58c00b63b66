"""What the prefix cache saves where requests begin alike, and costs where none do: the same work with and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import median

from millpond.core.sampling import SamplingParams
from millpond.core.step import Clock
from millpond.engine.engine import Engine
from millpond.errors import ConfigError, EngineError
from millpond.lab.fresh_engine import engine_over
from millpond.lab.workload import random_prompt, w1


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, which in a conversation comes behind all that was said before, and how many tokens answer it."""

    token_ids: tuple[int, ...]
    max_tokens: int


Conversation = tuple[Turn, ...]


def chat(vocab_size: int, random: Random) -> list[Conversation]:
    """Four conversations at once, of six turns: 64 tokens asked and 48 answered in each."""
    return [tuple(Turn(random_prompt(random, 64, vocab_size), 48) for _ in range(6)) for _ in range(4)]


def shared_prefix(vocab_size: int, random: Random) -> list[Conversation]:
    """16 requests at once: 512 tokens in common, 32 of their own, 64 tokens of output."""
    common = random_prompt(random, 512, vocab_size)
    return [(Turn(common + random_prompt(random, 32, vocab_size), 64),) for _ in range(16)]


def children(vocab_size: int, random: Random) -> list[Conversation]:
    """Eight answers of 64 tokens to one prompt of 256."""
    prompt = random_prompt(random, 256, vocab_size)
    return [(Turn(prompt, 64),) for _ in range(8)]


def strangers(vocab_size: int, random: Random) -> list[Conversation]:
    """W1 with prompts of its own each time: nothing is shared."""
    return [(Turn(each.prompt_token_ids, each.max_tokens),) for each in w1(vocab_size, random.randrange(1 << 30))]


WORKLOADS: dict[str, Callable[[int, Random], list[Conversation]]] = {
    "chat": chat,
    "shared": shared_prefix,
    "children": children,
    "strangers": strangers,
}


@dataclass(slots=True)
class Run:
    """One run of a workload: tokens of prompts, positions forwarded, steps, seconds, and to each first token."""

    prompt_tokens: int = 0
    forward_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.answers.values()))


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """A workload without the cache and with it. gain is the median over the rounds of the ratio of the speeds.

    saved_tokens are positions that the cache spares; speeds are output tokens per second of the whole workload, TTFT in
    seconds the median of a round's requests; both median of the rounds.
    """

    workload: str
    prompt_tokens: int
    forward_tokens: int
    saved_tokens: int
    plain_ttft: float
    cached_ttft: float
    plain_tok_s: float
    cached_tok_s: float
    gain: float

    def as_json(self) -> dict[str, object]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


@dataclass(slots=True)
class PrefixBench:
    """Measures the runner of one idle engine, each run with an engine, a scheduler and an empty cache of its own."""

    engine: Engine
    clock: Clock
    seed: int = 0

    def run(self, workloads: Sequence[str], rounds: int, notify: Callable[[str], None]) -> list[PrefixRow]:
        """A row for each workload, the median of the rounds after one that is not counted; notify hears each name.

        Raises ConfigError for an unknown workload, EngineError where an answer with the cache differs.
        """
        for name in workloads:
            if name not in WORKLOADS:
                raise ConfigError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
        rows = []
        for name in workloads:
            notify(name)
            rows.append(self._row(name, rounds))
        return rows

    def _row(self, name: str, rounds: int) -> PrefixRow:
        random = Random(self.seed)
        pairs = []
        for number in range(rounds + 1):
            work = WORKLOADS[name](self.engine.limits.vocab_size, random)
            order = (False, True) if number % 2 else (True, False)
            runs = {prefix_cache: self._run(work, prefix_cache) for prefix_cache in order}
            if runs[False].answers != runs[True].answers:
                raise EngineError(f"{name}: an answer with the prefix cache differs from the one without; a bug")
            pairs.append((runs[False], runs[True]))
        plain, cached = zip(*pairs[1:], strict=True)
        return PrefixRow(
            workload=name,
            prompt_tokens=cached[-1].prompt_tokens,
            forward_tokens=cached[-1].forward_tokens,
            saved_tokens=plain[-1].forward_tokens - cached[-1].forward_tokens,
            plain_ttft=median(median(run.first_token_seconds) for run in plain),
            cached_ttft=median(median(run.first_token_seconds) for run in cached),
            plain_tok_s=median(run.num_output_tokens / run.seconds for run in plain),
            cached_tok_s=median(run.num_output_tokens / run.seconds for run in cached),
            gain=median(one.seconds / other.seconds for one, other in pairs[1:]),
        )

    def _run(self, work: Sequence[Conversation], prefix_cache: bool) -> Run:
        """All conversations at once, each turn asked as soon as the one before it is answered."""
        reserve = self.engine.config.watermark_blocks
        engine, run = engine_over(self.engine, prefix_cache=prefix_cache, watermark_blocks=reserve), Run()
        asked: dict[str, float] = {}
        said: list[tuple[int, ...]] = [()] * len(work)

        def ask(index: int, turn: int) -> None:
            prompt, name = said[index] + work[index][turn].token_ids, f"{index}-{turn}"
            said[index] = prompt
            run.prompt_tokens += len(prompt)
            asked[name], run.answers[name] = self.clock(), []
            limit = work[index][turn].max_tokens
            engine.add_request(name, prompt, SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True))

        start = self.clock()
        for index in range(len(work)):
            ask(index, 0)
        while engine.has_unfinished:
            for output in engine.step():
                answer = run.answers[output.request_id]
                if not answer:
                    run.first_token_seconds.append(self.clock() - asked[output.request_id])
                answer += output.new_token_ids
                index, turn = map(int, output.request_id.split("-"))
                if output.finish_reason is not None and turn + 1 < len(work[index]):
                    said[index] += tuple(answer)
                    ask(index, turn + 1)
        run.seconds = self.clock() - start
        counters = engine.scheduler.counters
        run.forward_tokens, run.steps = counters.forward_tokens, counters.iterations
        return run
