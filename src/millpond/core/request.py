"""A request: what was asked, what exists so far, and the states it may pass through."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from millpond.core.masks import TokenMask
from millpond.core.sampling import SamplingParams
from millpond.errors import InvariantError

NEVER = sys.maxsize


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


LEGAL_EDGES: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One request as the scheduler sees it.

    max_tokens, stop_token_ids, seed and mask are resolved by the engine before the scheduler sees them:
    max_tokens fits the pool, stop_token_ids holds the end-of-text ids unless they are ignored.
    block_ids[i] holds the K/V of positions i * block_size to (i + 1) * block_size - 1.
    draft_token_ids are guesses of the tokens to come, there while the step that tries them is in flight.
    reads_prefix_cache False computes every position, whatever could be found. num_cached_tokens were found when it was
    admitted last, num_hit_tokens, all of its prompt, when it was admitted first; block_keys are the prefix cache's keys
    of its full blocks, as far as they were asked for, disk_keys the disk's, behind that of its salt; its next block
    becomes findable once publish_at tokens are computed.
    priority and tenant are what the policy orders by (core/policies.py); rank, ticket and num_charged_tokens are its
    own.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_param: str | None = None
    num_preemptions: int = 0
    num_tokens_at_admission: int = 0
    draft_token_ids: tuple[int, ...] = ()
    mask: TokenMask | None = None
    reads_prefix_cache: bool = True
    num_cached_tokens: int = 0
    num_hit_tokens: int = 0
    block_keys: list[int] = field(default_factory=list)
    publish_at: int = NEVER
    priority: int = 0
    tenant: str = ""
    rank: tuple[float, int] = (0, -1)
    ticket: int = NEVER
    num_charged_tokens: int = 0
    disk_keys: list[bytes] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Those whose K/V does not exist yet: what is left to forward."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def token_ids_between(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens at positions start to end - 1, over the prompt and what was generated."""
        prompt = self.prompt_token_ids
        if start >= len(prompt):
            return tuple(self.output_token_ids[start - len(prompt) : end - len(prompt)])
        return prompt[start:end] + tuple(self.output_token_ids[: max(0, end - len(prompt))])

    def move_to(self, state: RequestState) -> None:
        """Follow one edge of the table; anything else is a bug and raises InvariantError."""
        if state not in LEGAL_EDGES[self.state]:
            raise InvariantError(f"request {self.request_id}: {self.state.value} -> {state.value} is not a legal edge")
        self.state = state
