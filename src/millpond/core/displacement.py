"""Who must go so that the head of the waiting can start: nobody, or some of the last in order, as the policy says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from millpond.core.block_pool import BlockPool
from millpond.core.policies import Policy
from millpond.core.request import Request


def tokens_too_many(head: Request, running: Sequence[Request], wanted: int, budget: int, least: int) -> int:
    """How many must go so that a step of such a budget has the least for the head, a token mostly; the running want so
    many in all.

    Those behind the head can do with one token each, so that each of them that goes leaves one.
    """
    if running and head.rank < running[-1].rank:
        wanted = sum([each.num_missing_tokens if each.rank < head.rank else 1 for each in running])
    return max(0, wanted - budget + least)


def choose_victims(
    head: Request,
    running: Sequence[Request],
    policy: Policy,
    pool: BlockPool,
    *,
    fewest: int,
    need: int,
    found: Sequence[int],
) -> list[Request] | None:
    """The fewest that may be preempted for the head, from the last on; None where that would not be enough.

    It needs so many blocks, of which it has found some.
    """
    victims: list[Request] = []
    holders: Counter[int] = Counter()
    room = pool.num_free
    for victim in reversed(running):
        if not policy.outranks(head, victim):
            break
        victims.append(victim)
        holders.update(victim.block_ids)
        room += sum([holders[block_id] == pool.ref_count(block_id) for block_id in victim.block_ids])
        taken = need - sum([pool.ref_count(block_id) > holders[block_id] for block_id in found])
        if len(victims) >= fewest and taken <= room:
            return victims
    return None
