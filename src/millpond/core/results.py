"""Whether a step's result answers the step: each scheduled sample once, and nothing else."""

from __future__ import annotations

from millpond.core.request import Request
from millpond.core.step import RequestFault, ScheduledRequest, StepResult
from millpond.errors import InvariantError


def checked(
    in_flight: tuple[tuple[ScheduledRequest, Request], ...], result: StepResult
) -> tuple[dict[str, tuple[int, ...]], dict[str, RequestFault]]:
    """Tokens and faults by request id, each scheduled sample answered once. Raises InvariantError otherwise."""
    tokens_of = dict(result.sampled)
    fault_of = {each.request_id: each for each in result.faults}
    answered = tokens_of.keys() | fault_of.keys() if fault_of else tokens_of.keys()
    if len(answered) != len(result.sampled) + len(result.faults):
        answers = [each.request_id for each in result.sampled] + [each.request_id for each in result.faults]
        raise InvariantError(f"a step's result answers a request twice: {sorted(answers)}")
    if strange := answered - {each.request_id for each, _ in in_flight}:
        raise InvariantError(f"request {min(strange)}: has a result but was not scheduled in this step")
    for each, request in in_flight:
        if (token_ids := tokens_of.get(each.request_id)) is not None:
            if len(token_ids) != 1 or not each.samples:
                _check_tokens(each, token_ids)
        elif each.samples and not request.is_finished and each.request_id not in fault_of:
            raise InvariantError(f"request {each.request_id}: scheduled to sample, got neither a token nor a fault")
    return tokens_of, fault_of


def _check_tokens(each: ScheduledRequest, token_ids: tuple[int, ...]) -> None:
    """What holds of a single token that was asked for is all that is asked of most."""
    if not each.samples:
        raise InvariantError(f"request {each.request_id}: has a token but was scheduled without sampling")
    drafts = each.token_ids[len(each.token_ids) - each.num_drafts :]
    if not token_ids or token_ids[:-1] != drafts[: len(token_ids) - 1]:
        raise InvariantError(f"request {each.request_id}: has tokens {token_ids} behind the drafts {drafts}")
