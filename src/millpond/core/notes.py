"""What a step's queues say of themselves: why the head of waiting was not admitted, and who preempted whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from millpond.core.request import Request


class Blocked(NamedTuple):
    """What kept the head of waiting from being admitted in a step: it needs `need`, and `free` of `total` were free.

    on says of what: `slots`; `blocks`; `reserve`, where enough blocks are free, but held_back of them not for
    newcomers; `budget`, where the running requests take all tokens of the step; `prefix`, a wait of one step for a
    block that another request is computing; `disk`, until its prefix has been read; or `policy`, which has another go
    first. Blocks that it shares with running requests are not among the needed.
    """

    request_id: str
    on: str
    need: int
    free: int
    total: int
    held_back: int = 0


class Preemption(NamedTuple):
    """A running request gave its blocks, and what is computed in them, for `by` to grow (maybe itself) or to start."""

    request_id: str
    by: str
    num_blocks: int
    num_computed_tokens: int


@dataclass(slots=True)
class StepNotes:
    """Of the newest step: blocked is None where nobody was left waiting."""

    blocked: Blocked | None = None
    preemptions: list[Preemption] = field(default_factory=list)

    def begin(self) -> None:
        """A new step."""
        self.blocked = None
        if self.preemptions:
            self.preemptions = []

    def preempt(self, victim: Request, by: Request) -> None:
        """Called while the victim still holds what it loses."""
        self.preemptions.append(
            Preemption(victim.request_id, by.request_id, len(victim.block_ids), victim.num_computed_tokens)
        )

    def block(self, head: Request, num_free_slots: int, num_slots: int, budget: int | None) -> None:
        """The head was left waiting for something else than blocks: a slot, or the step had no token left."""
        if num_free_slots == 0 or budget is None:
            self.blocked = Blocked(head.request_id, "slots", 1, num_free_slots, num_slots)
        else:
            self.blocked = Blocked(head.request_id, "budget", 1, 0, budget)
