"""The seam between control and data: one immutable message each way per step.

What a step has many of, requests or fields, is a named tuple: a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from millpond.core.masks import TokenMask
from millpond.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """What a runner needs to know of a request that takes a slot, for the first time or after a preemption."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    mask: TokenMask | None = None


class ScheduledRequest(NamedTuple):
    """One request's share of a step: token_ids at positions first_position, first_position + 1, ...

    block_ids is the whole block table. samples says that the last position's logits give the next
    token, whose index among the outputs is output_position (the key of its random draw).
    The last num_drafts of token_ids are guesses of the tokens to come: each of them, and the token before the first,
    is sampled behind, as long as the guesses are right.
    admission is set in the first step after the request took its slot, and only then.
    """

    request_id: str
    slot: int
    first_position: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    samples: bool
    output_position: int
    admission: Admission | None = None
    num_drafts: int = 0


BlockData = bytes | bytearray | memoryview


class Load(NamedTuple):
    """A block whose K/V is to be in place before the step's forward: its bytes as the runner once gave them."""

    block_id: int
    data: BlockData


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work, first in order first, and what happened to the queues on the way to it (request ids).

    loads are blocks of requests that this step admits.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([len(each.token_ids) for each in self.scheduled])


class SampledTokens(NamedTuple):
    """What one request got: a token, and one more for each of its drafts that was the token before it."""

    request_id: str
    token_ids: tuple[int, ...]


class TokenScore(NamedTuple):
    """One token's log probability under the raw logits of its position, and its rank among all tokens, from 1 on.

    top are the likeliest tokens there and their log probabilities, likeliest first, lower id first among equals.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class RequestScores(NamedTuple):
    """The scores of a step for one request that asked for them.

    sampled are those of its new tokens, in order; prompt those of the prompt's tokens from prompt_position on.
    embedding is the prompt's, as little-endian float32.
    """

    request_id: str
    sampled: tuple[TokenScore, ...] = ()
    prompt_position: int = 0
    prompt: tuple[TokenScore, ...] = ()
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class RequestFault:
    """A fault that belongs to one request (its logits are not finite, say): it ends with `error`, nobody else does.

    param names the field of the request that is to blame, where one is.
    """

    request_id: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class RunnerTimes:
    """Where a runner's seconds went: arrays before the forward pass, the pass itself, choosing tokens after it."""

    arrays_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0


NO_TIMES = RunnerTimes()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the forward gave: the tokens of each scheduled request with `samples`, less the faults.

    scores has an entry for each request that has any in this step, whether it got a token or not.
    """

    sampled: tuple[SampledTokens, ...]
    faults: tuple[RequestFault, ...] = ()
    times: RunnerTimes = field(default=NO_TIMES, compare=False)
    scores: tuple[RequestScores, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([len(each.token_ids) for each in self.sampled])


class StepStats(NamedTuple):
    """One step in numbers, for metrics, the log and the lab. Times are seconds of the injected clock.

    num_tokens counts the positions forwarded, num_drafted of them guesses; num_sampled the tokens that came out of
    them, num_accepted of them thanks to a guess. execute_seconds is the whole of the runner, times its parts where it
    knows them. Tokens of the prefix cache are counted in the step that admits the request: num_queried of new requests'
    prompts, num_hit of them found, num_resumed_hit found again after a preemption; num_recomputed of num_tokens were
    computed before. update_seconds ends when the scheduler has its tokens, text_seconds is what then became of them.
    audited says that the rules were checked.
    """

    step: int
    num_scheduled: int
    num_tokens: int
    num_sampled: int
    num_running: int
    num_waiting: int
    free_blocks: int
    num_blocks: int
    num_preempted: int
    schedule_seconds: float
    execute_seconds: float
    update_seconds: float
    text_seconds: float
    times: RunnerTimes = NO_TIMES
    num_drafted: int = 0
    num_accepted: int = 0
    audited: bool = False
    num_queried: int = 0
    num_hit: int = 0
    num_resumed_hit: int = 0
    num_recomputed: int = 0


class Runner(Protocol):
    """Turns a SchedulerOutput into sampled tokens: the real model, the simulator's cost model, or a test's script."""

    def execute(self, output: SchedulerOutput) -> StepResult: ...


class Clock(Protocol):
    """Seconds that only go forward (time.monotonic, or a virtual clock)."""

    def __call__(self) -> float: ...
