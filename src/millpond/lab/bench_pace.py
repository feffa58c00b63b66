"""What a long prompt does to requests that decode: the time between their tokens, in quiet and beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from millpond.core.sampling import SamplingParams
from millpond.core.step import Clock
from millpond.engine.engine import Engine
from millpond.errors import EngineError
from millpond.lab.latency import distribution
from millpond.lab.workload import random_prompt

STREAM_PROMPT_TOKENS = 64
QUIET_STEPS = 300


@dataclass(frozen=True, slots=True)
class PaceRow:
    """Seconds between two tokens of a stream, by step, and from the long prompt's arrival to its first token."""

    num_streams: int
    prompt_tokens: int
    quiet: tuple[float, ...]
    beside: tuple[float, ...]
    prefill_seconds: float

    @property
    def ratio(self) -> float:
        """p99 beside the prompt over p99 in quiet."""
        return distribution(self.beside)["p99"] / distribution(self.quiet)["p99"]

    def as_json(self) -> dict[str, object]:
        figures = {
            f"{name}_{share}_ms": round(1e3 * distribution(seconds)[share], 2)
            for name, seconds in (("quiet", self.quiet), ("beside", self.beside))
            for share in ("p50", "p99")
        }
        return {
            "streams": self.num_streams,
            "prompt_tokens": self.prompt_tokens,
            **figures,
            "p99_ratio": round(self.ratio, 2),
            "prefill_seconds": round(self.prefill_seconds, 3),
        }


def measure_pace(
    engine: Engine,
    num_streams: int,
    prompt_tokens: int,
    clock: Clock,
    notify: Callable[[str], None] = lambda line: None,
    seed: int = 0,
) -> PaceRow:
    """num_streams decode; QUIET_STEPS of that are timed, then those until a prompt of so many tokens has its first one.

    And as many quiet ones once more: the streams have grown longer meanwhile, which alone makes their steps longer.
    Nobody samples an end. Raises EngineError where a stream loses its pace to the pool, or ends before the prompt is
    through, and InvalidRequestError for a prompt that does not fit.
    """
    random, vocab_size = Random(seed), engine.limits.vocab_size
    sampling = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    streams = [f"pace-{index}" for index in range(num_streams)]
    for name in streams:
        engine.add_request(name, random_prompt(random, STREAM_PROMPT_TOKENS, vocab_size), sampling)
    while engine.scheduler.num_decoding < num_streams:
        engine.step()
    notify(f"{num_streams} streams, quiet")
    quiet = [_step(engine, streams, clock)[0] for _ in range(QUIET_STEPS)]
    notify(f"{num_streams} streams beside a prompt of {prompt_tokens} tokens")
    long_prompt = random_prompt(random, prompt_tokens, vocab_size)
    engine.add_request("pace-long", long_prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    beside, is_through = [], False
    while not is_through:
        seconds, names = _step(engine, streams, clock)
        beside.append(seconds)
        is_through = "pace-long" in names
    notify(f"{num_streams} streams, quiet again")
    quiet += [_step(engine, streams, clock)[0] for _ in range(QUIET_STEPS)]
    engine.abort_all()
    return PaceRow(num_streams, prompt_tokens, tuple(quiet), tuple(beside), sum(beside))


def _step(engine: Engine, streams: Sequence[str], clock: Clock) -> tuple[float, set[str]]:
    """One step: its seconds, which are the time between two tokens of each stream, and who got a token."""
    started = clock()
    outputs = engine.step()
    seconds = clock() - started
    names = {output.request_id for output in outputs if output.new_token_ids}
    if missing := set(streams) - names:
        raise EngineError(
            f"{len(missing)} of {len(streams)} streams got no token in a step: give the pool more memory "
            f"(--kv-memory), or measure a shorter prompt (--prompt-tokens)"
        )
    return seconds, names
