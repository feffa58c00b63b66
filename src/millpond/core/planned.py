"""A running request's part of a step, as the runner gets it."""

from __future__ import annotations

from millpond.core.counters import SchedulerCounters
from millpond.core.request import Request
from millpond.core.step import Admission, ScheduledRequest
from millpond.errors import InvariantError


def planned(request: Request, share: int, samples: bool, counters: SchedulerCounters) -> ScheduledRequest:
    """The next `share` tokens of a request and its guesses, for the runner. Raises InvariantError without a slot."""
    first, drafts = request.num_computed_tokens, request.draft_token_ids
    end = first + share
    if request.num_preemptions:
        counters.recomputed_tokens += max(0, min(end, request.num_tokens_at_admission) - first)
    if request.slot is None:
        raise InvariantError(f"request {request.request_id}: running without a slot")
    token_ids, table = request.token_ids_between(first, end), tuple(request.block_ids)
    # By position: names cost half as much again, and this is done for each request in each step.
    return ScheduledRequest(
        request.request_id,
        request.slot,
        first,
        token_ids + drafts if drafts else token_ids,
        table,
        samples,
        len(request.output_token_ids),
        _admission(request) if first == request.num_cached_tokens else None,
        len(drafts),
    )


def _admission(request: Request) -> Admission:
    output = tuple(request.output_token_ids)
    return Admission(request.prompt_token_ids, output, request.sampling, request.seed, request.mask)
