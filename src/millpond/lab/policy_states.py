"""Policies as part of a state that is explored: small ones, their copies, and what their decisions depend on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from millpond.core.fair_shares import Fair
from millpond.core.policies import Policy, Priority, make_policy
from millpond.core.request import Request
from millpond.core.scheduler import Scheduler

# So small that a few steps of a few tokens reach all that can happen.
AGEING_STEPS = 2
QUANTUM = 2
MOST_TURNS = 2
CHOICES = (0, 1)  # a request's priority, or its tenant, whose weight is one more
HALVES = 2  # what is owed comes in
NO_PLACE = len(CHOICES)


def small_policy(name: str) -> Policy:
    weights = {str(choice): choice + 1.0 for choice in CHOICES}
    return make_policy(name, weights, ageing_steps=AGEING_STEPS, quantum=QUANTUM, most_turns=MOST_TURNS)


def copy_policy(policy: Policy, twins: Mapping[int, Request]) -> Policy:
    """A policy of its own over the twins of its requests (by id() of the original)."""
    if isinstance(policy, Priority):
        aged = Priority(policy.ageing_steps)
        aged.line = [twins[id(request)] for request in policy.line]
        return aged
    return _copy_fair(policy, twins) if isinstance(policy, Fair) else policy


def _copy_fair(policy: Fair, twins: Mapping[int, Request]) -> Fair:
    fair = Fair(policy.weights, policy.quantum, policy.most_turns)
    for name, tenant in policy.tenants.items():
        line = OrderedDict((key, twins[id(request)]) for key, request in tenant.line.items())
        fair.tenants[name] = replace(tenant, line=line)
    fair.idle = OrderedDict((name, fair.tenants[name]) for name in policy.idle)
    fair.busy = OrderedDict((name, fair.tenants[name]) for name in policy.busy)
    fair.preempted = {ticket: twins[id(request)] for ticket, request in policy.preempted.items()}
    fair.next_ticket, fair._is_arranged = policy.next_ticket, policy._is_arranged
    return fair


def numbers_of(scheduler: Scheduler) -> Iterator[int]:
    """What the policy's next decisions depend on beside the order of the running and of the lines."""
    policy = scheduler.policy
    if isinstance(policy, Priority):
        now = scheduler.counters.iterations
        for request in (*scheduler.running, *policy.line):
            # No newcomer is before step `now`, so that who is, is before all of them.
            yield max(0, int(request.rank[0]) - now)
        yield from (sum(one.rank < other.rank for one in scheduler.running) for other in policy.line)
    elif isinstance(policy, Fair):
        yield from _numbers_of_fair(policy, scheduler)


def _numbers_of_fair(policy: Fair, scheduler: Scheduler) -> Iterator[int]:
    places = {name: place for place, name in enumerate(policy.tenants)}
    started = (*scheduler.running, *policy.preempted.values())
    tickets = sorted(request.ticket for request in started)
    for request in started:
        yield places[request.tenant]
        yield tickets.index(request.ticket)
    for name, tenant in policy.tenants.items():
        late = [each.num_output_tokens - each.num_charged_tokens for each in started if each.tenant == name]
        yield int(name)
        yield round(HALVES * (policy.quantum + tenant.owed + sum(late) / tenant.weight))
        yield len(tenant.line)
    for turns in (policy.idle, policy.busy):
        yield from (places[name] for name in turns)
        yield NO_PLACE
