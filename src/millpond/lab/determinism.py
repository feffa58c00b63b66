"""The same tokens, alone or in a crowd: requests run alone, then under every condition that must not change a bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from millpond.config import EngineConfig
from millpond.core.block_pool import blocks_for_length
from millpond.core.counters import SchedulerCounters
from millpond.core.request import Request
from millpond.core.sampling import SamplingParams
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import StepLoad
from millpond.core.step import Runner, SchedulerOutput, StepResult
from millpond.engine.engine import Engine
from millpond.errors import ConfigError
from millpond.lab.asking import Ask, Got, drive
from millpond.lab.bits import Difference, Told, fingerprint, first_difference, told_by
from millpond.lab.determinism_asks import draw_asks
from millpond.lab.determinism_http import STREAMED, over_http, told_over_http
from millpond.lab.fresh_engine import engine_over
from millpond.lab.workload import random_prompt

LEAST_REQUESTS = 16  # every kind twice
GUESSES = 4  # of a step and request
LARGEST_CHUNK = 48  # tokens of prompts in a step, where they are cut at random
STEPS_PER_TOKEN = 100  # more is no progress, however often requests are preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is checked: requests of prompts and outputs of up to so many tokens, up to `slots` of them at once."""

    num_requests: int = 32
    seed: int = 0
    slots: int = 12
    prompt_tokens: int = 128
    max_tokens: int = 20

    def __post_init__(self) -> None:
        least = {"num_requests": LEAST_REQUESTS, "slots": 2, "prompt_tokens": 32, "max_tokens": 4}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(
                    f"{name} must be at least {low} to force what is to be checked, got {getattr(self, name)}"
                )

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def longest_stranger(self) -> int:
        return self.prompt_tokens // 2 + self.max_tokens

    def config(self, **changes: Any) -> EngineConfig:
        """Of an engine that has room for all of it at once, guesses included, and that checks its own rules."""
        sizes: dict[str, Any] = {
            "max_model_len": self.longest,
            "max_num_seqs": self.slots,
            "max_num_batched_tokens": max(128, self.slots * (1 + GUESSES)),
            "num_blocks": self.slots * blocks_for_length(self.longest, EngineConfig().block_size),
            "speculative": "ngram",
            "speculative_tokens": GUESSES,
            "audit": True,
        }
        return EngineConfig(**{**sizes, **changes})

    def asks(self, vocab_size: int) -> dict[str, Ask]:
        return draw_asks(
            self.seed,
            self.num_requests,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            vocab_size=vocab_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One way to run all the requests. forces names what of its Counts may not stay 0, or it has shown nothing.

    A condition with warm is run a second time on what the first has left in the prefix cache, the latest first. With a
    policy other than fcfs each request draws its priority or its tenant, and there are places for few of them.
    """

    name: str
    forces: tuple[str, ...]
    chunks: bool = False
    small_pool: bool = False
    prefix_cache: bool = False
    warm: bool = False
    guesses: bool = False
    strangers: bool = False
    http: bool = False
    policy: str = "fcfs"


ALONE = Condition(name="alone", forces=())
CONDITIONS: dict[str, Condition] = {
    each.name: each
    for each in (
        Condition(name="crowd", forces=("others",)),
        Condition(name="chunks", forces=("others", "cut"), chunks=True),
        Condition(name="preempted", forces=("preempted",), small_pool=True),
        Condition(name="cache", forces=("others", "found"), prefix_cache=True, warm=True),
        Condition(name="resumed", forces=("preempted", "resumed"), small_pool=True, prefix_cache=True),
        Condition(name="guesses", forces=("others", "right", "wrong"), guesses=True),
        Condition(
            name="everything",
            forces=("others", "cut", "preempted", "found", "right", "wrong", "aborted"),
            chunks=True,
            small_pool=True,
            prefix_cache=True,
            guesses=True,
            strangers=True,
        ),
        *(
            Condition(name=policy, forces=("others", "preempted", "displaced"), prefix_cache=True, policy=policy)
            for policy in ("priority", "fair")
        ),
        Condition(name="http", forces=("others", "found", "streamed"), prefix_cache=True, http=True),
    )
}


def check_conditions(names: Sequence[str]) -> None:
    """Raise ConfigError unless each is the name of a condition."""
    for name in names:
        if name not in CONDITIONS:
            raise ConfigError(f"no condition is called {name!r}; there are {', '.join(CONDITIONS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a run was made of, and what was forced in it.

    others: the most requests that shared a step with one. cut: parts of a prompt that were not its last. preempted,
    displaced: preemptions, and those of them for who goes before. found, resumed: tokens out of the prefix cache, for
    new and for preempted requests. right, wrong: guesses. aborted: strangers that were ended in the middle. streamed:
    answers that came in pieces.
    """

    steps: int = 0
    others: int = 0
    cut: int = 0
    preempted: int = 0
    displaced: int = 0
    found: int = 0
    resumed: int = 0
    right: int = 0
    wrong: int = 0
    aborted: int = 0
    streamed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One run of all requests compared with what each got alone. difference is the first of num_different."""

    condition: str
    num_answers: int
    num_tokens: int
    counts: Counts
    missing: tuple[str, ...] = ()
    num_different: int = 0
    difference: Difference | None = None

    @property
    def verdict(self) -> str:
        if self.num_different:
            return "different"
        return "not forced" if self.missing else "same"

    def as_json(self) -> dict[str, Any]:
        difference = None if self.difference is None else self.difference.as_json()
        return {
            "condition": self.condition,
            "verdict": self.verdict,
            "answers": self.num_answers,
            "tokens": self.num_tokens,
            **asdict(self.counts),
            "missing": list(self.missing),
            "num_different": self.num_different,
            "difference": difference,
        }


class Watcher:
    """A runner that counts what its steps were made of."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.others = 0
        self.cut = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.others = max(self.others, len(output.scheduled) - 1)
        self.cut += sum(not each.samples for each in output.scheduled)
        return self.inner.execute(output)


class Chopper(Scheduler):
    """A scheduler that gives the prompts of each step a budget of its own, drawn at random."""

    def __init__(self, random: Random, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._random = random

    def schedule(self, prefill_budget: int | None = None) -> SchedulerOutput:
        return super().schedule(self._random.randint(1, self._random.choice((1, 7, LARGEST_CHUNK))))


class KnownGuesses:
    """Guesses from answers that are known beforehand, some of them wrong on purpose."""

    def __init__(self, answers: Mapping[str, Got], vocab_size: int, random: Random) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._random = random

    def draft(self, request: Request, most: int, load: StepLoad) -> tuple[int, ...]:
        known = self._answers.get(request.request_id, Got()).token_ids[request.num_output_tokens :]
        num_right = self._random.randint(0, GUESSES)
        return tuple(
            token_id if index < num_right else (token_id + 1) % self._vocab_size
            for index, token_id in enumerate(known[: min(most, self._random.randint(0, GUESSES))])
        )

    def learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """They get no better."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept of a request."""


class Strangers:
    """Requests that come between the others and are ended in the middle; the first one comes at once, and is."""

    def __init__(self, engine: Engine, plan: Plan, random: Random) -> None:
        self._engine, self._plan, self._random = engine, plan, random
        self._steps_left: dict[str, int] = {}
        self.num_aborted = 0

    def before_step(self, more_to_come: bool) -> None:
        is_first = not self._steps_left
        if is_first or (more_to_come and self._random.random() < 0.2):
            self._add(steps=2 if is_first else self._random.randint(1, 16))
        for name in self._steps_left:
            self._steps_left[name] -= 1
            if self._steps_left[name] == 0:
                self.num_aborted += name in self._engine.unfinished_ids
                self._engine.abort(name)

    def _add(self, steps: int) -> None:
        name, vocab_size = f"stranger-{len(self._steps_left)}", self._engine.limits.vocab_size
        prompt = random_prompt(
            self._random, self._random.randint(1, self._plan.longest_stranger - self._plan.max_tokens), vocab_size
        )
        sampling = SamplingParams(max_tokens=self._plan.max_tokens, seed=1, ignore_eos=True)
        self._engine.add_request(name, prompt, sampling)
        self._steps_left[name] = steps


@dataclass(slots=True)
class Determinism:
    """Checks one engine, which must be idle and made with plan.config().

    reference is what each request gets alone, from this engine or from another that must give the same.
    """

    engine: Engine
    plan: Plan
    reference: dict[str, Got] = field(default_factory=dict)
    asks: dict[str, Ask] = field(init=False)

    def __post_init__(self) -> None:
        self.asks = self.plan.asks(self.engine.limits.vocab_size)

    @property
    def fingerprint(self) -> str:
        """Of the reference: the same wherever every bit of it is."""
        return fingerprint({name: told_by(each) for name, each in self.reference.items()})

    def run(self, conditions: Sequence[str], notify: Callable[[str], None] = lambda name: None) -> list[Row]:
        """A row for each run: all requests alone, then under each condition. notify hears of each before it starts.

        Raises ConfigError for a condition that is not known, and whatever a broken engine raises.
        """
        check_conditions(conditions)
        notify(ALONE.name)
        rows = [self._alone()]
        for name in conditions:
            notify(name)
            rows += self._run(CONDITIONS[name])
        return rows

    def _alone(self) -> Row:
        engine, watcher = self._engine(ALONE, Random(0), max_num_seqs=1)
        got = drive(engine, self.asks, max_steps=self._most_steps)
        self.reference = self.reference or got
        return self._row(ALONE, ALONE.name, got, self._counts(engine, watcher))

    def _run(self, condition: Condition) -> list[Row]:
        random = Random(f"{self.plan.seed}/{condition.name}")
        engine, watcher = self._engine(condition, random)
        order = list(self.asks)
        random.shuffle(order)
        if condition.http:
            return [self._over_http(condition, engine, watcher, order)]
        strangers = Strangers(engine, self.plan, random)
        rows, before = [], Counts()
        for name in ("cache, cold", "cache, warm") if condition.warm else (condition.name,):
            got = drive(
                engine,
                {each: self._placed(each, order, condition.policy, random) for each in order},
                max_steps=self._most_steps,
                arrivals=random,
                before_step=strangers.before_step if condition.strangers else lambda more_to_come: None,
            )
            counts = self._counts(engine, watcher, aborted=strangers.num_aborted)
            rows.append(self._row(condition, name, got, _since(before, counts)))
            before = counts
            order.reverse()
        return rows

    def _engine(self, condition: Condition, random: Random, **sizes: Any) -> tuple[Engine, Watcher]:
        base = self.engine
        if condition.small_pool:
            size = base.scheduler.block_size
            needs = [len(ask.prompt) + (ask.sampling.max_tokens or 0) for ask in self.asks.values()]
            needs.append(self.plan.longest_stranger)
            sizes["num_blocks"] = min(base.scheduler.pool.num_blocks, blocks_for_length(max(needs), size) + 2)
        if condition.policy != "fcfs":
            sizes["max_num_seqs"] = max(2, self.plan.slots // 2)
        drafter = KnownGuesses(self.reference, base.limits.vocab_size, random) if condition.guesses else None
        watcher = Watcher(base.runner)
        engine = engine_over(
            base,
            wrap=lambda runner: watcher,
            scheduler_type=partial(Chopper, random) if condition.chunks else Scheduler,
            drafter=drafter,
            prefix_cache=condition.prefix_cache,
            policy=condition.policy,
            **sizes,
        )
        return engine, watcher

    def _placed(self, name: str, order: list[str], policy: str, random: Random) -> Ask:
        """A request with what a policy goes by: any priority; a tenant of its own, or that of most."""
        ask = self.asks[name]
        if policy == "priority":
            return replace(ask, priority=random.randint(-3, 3))
        return ask if policy == "fcfs" else replace(ask, tenant="" if name in order[: len(order) * 3 // 4] else name)

    @property
    def _most_steps(self) -> int:
        answers = sum(ask.sampling.n * (len(ask.prompt) + self.plan.max_tokens) for ask in self.asks.values())
        return STEPS_PER_TOKEN * answers

    def _counts(self, engine: Engine, watcher: Watcher, **counted: int) -> Counts:
        counters: SchedulerCounters = engine.scheduler.counters
        return Counts(
            steps=counters.iterations,
            others=watcher.others,
            cut=watcher.cut,
            preempted=counters.preemptions,
            displaced=counters.displaced,
            found=counters.hit_tokens,
            resumed=counters.resumed_hit_tokens,
            right=counters.accepted_tokens,
            wrong=counters.drafted_tokens - counters.accepted_tokens,
            **counted,
        )

    def _row(self, condition: Condition, name: str, got: Mapping[str, Got], counts: Counts) -> Row:
        pairs = [(each, told_by(self.reference[each]), told_by(other)) for each, other in got.items()]
        return _compared(condition, name, pairs, counts)

    def _over_http(self, condition: Condition, engine: Engine, watcher: Watcher, order: list[str]) -> Row:
        """Every request whole and, where it can be, streamed, all of them in one crowd."""
        pairs = []
        for name, how, answers in over_http(engine, {name: self.asks[name] for name in order}):
            for answer, told in answers.items():
                ours = told_over_http(engine.tokenizer, self.asks[name], self.reference[answer])
                pairs.append((f"{answer}, {how}", ours, told))
        num_streamed = sum(name.endswith(STREAMED) for name, _, _ in pairs)
        return _compared(condition, condition.name, pairs, self._counts(engine, watcher, streamed=num_streamed))


def _compared(condition: Condition, name: str, pairs: Sequence[tuple[str, Told, Told]], counts: Counts) -> Row:
    found = [each for pair in pairs if (each := first_difference(*pair)) is not None]
    missing = tuple(each for each in condition.forces if not getattr(counts, each))
    num_tokens = sum(len(expected.output) for _, expected, _ in pairs)
    return Row(name, len(pairs), num_tokens, counts, missing, len(found), found[0] if found else None)


def _since(before: Counts, now: Counts) -> Counts:
    """What came between two counts; the most at once is that of all."""
    earlier = asdict(before)
    return Counts(**{k: v if k == "others" else v - earlier[k] for k, v in asdict(now).items()})
