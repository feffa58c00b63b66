"""The fair policy: every tenant gets its turn, and tokens are shared by weight.

Turns are deficit round robin, paid afterwards: a tenant owes the tokens that were computed for it, divided by its
weight. When its turn comes it is let off a QUANTUM, and has its requests started while it owes less than nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from millpond.core.request import NEVER, Request

QUANTUM = 256  # tokens
MOST_TURNS = 64  # that anybody sits out for what it has had


@dataclass(slots=True, eq=False)
class Tenant:
    """One with unfinished requests. line has those that never ran, by id; owed is in tokens over the weight."""

    name: str
    weight: float
    line: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    num_running: int = 0
    num_unfinished: int = 0
    owed: float = 0.0


class Fair:
    """First those whose tenant has nothing running, then who was preempted, then the rest; each in turn.

    A request gets a ticket when it starts for the first time, and keeps it. Of a tenant's running requests the one with
    the i-th ticket, from 0, has the rank (i / weight, ticket). So everybody's first request goes before anybody's
    second; that, and nothing else, may preempt: whose tenant has nothing running takes the place of a second one, or of
    a first one with a later ticket. Once running, the earliest ticket is never preempted.
    weights are those that are not 1, by tenant; nobody sits out more than most_turns. A tenant without unfinished
    requests is forgotten, and what it owes.
    """

    may_preempt = True

    def __init__(
        self, weights: Mapping[str, float] | None = None, quantum: float = QUANTUM, most_turns: int = MOST_TURNS
    ) -> None:
        self.weights = weights or {}
        self.quantum = quantum
        self.most_turns = most_turns
        self.tenants: dict[str, Tenant] = {}
        self.idle: OrderedDict[str, Tenant] = OrderedDict()  # with a line and nothing running, in turn
        self.busy: OrderedDict[str, Tenant] = OrderedDict()  # with a line beside what runs, in turn
        self.preempted: dict[int, Request] = {}  # by ticket
        self.next_ticket = 0
        self._is_arranged = True

    def enter(self, request: Request, step: int) -> None:
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            weight = self.weights.get(request.tenant, 1.0)
            tenant = self.tenants[request.tenant] = Tenant(request.tenant, weight)
        tenant.line[request.request_id] = request
        tenant.num_unfinished += 1
        self._file(tenant)

    def put_back(self, request: Request) -> None:
        self._charge(request)
        self.preempted[request.ticket] = request
        self._count_running(self.tenants[request.tenant], -1)

    def head(self, waiting: OrderedDict[str, Request]) -> Request:
        request = self._resumable() or (self._next(self.idle) if self.idle else None)
        if request is None:
            request = self.preempted[min(self.preempted)] if self.preempted else self._next(self.busy)
        tenant = self.tenants[request.tenant]
        ticket = self.next_ticket if request.ticket == NEVER else request.ticket
        request.rank = (tenant.num_running / tenant.weight, ticket)
        return request

    def _resumable(self) -> Request | None:
        """The earliest of the preempted whose tenant has nothing running."""
        tickets = [ticket for ticket, each in self.preempted.items() if not self.tenants[each.tenant].num_running]
        return self.preempted[min(tickets)] if tickets else None

    def _next(self, turns: OrderedDict[str, Tenant]) -> Request:
        for tenant in turns.values():
            if tenant.owed < self.quantum:  # as most often the first of them
                break
        else:
            tenant = min(turns.values(), key=self._turns_until)
        return next(iter(tenant.line.values()))

    def _turns_until(self, tenant: Tenant) -> int:
        """The how manyth of its turns is the next to start a request; 0 for the one that it has now."""
        return int(tenant.owed // self.quantum) + 1

    def outranks(self, head: Request, running: Request) -> bool:
        return head.rank[0] == 0 and head.rank < running.rank

    def start(self, request: Request) -> None:
        tenant = self.tenants[request.tenant]
        if self.preempted.pop(request.ticket, None) is None:
            self._pass_turns(tenant)
            del tenant.line[request.request_id]
            request.ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
            self._owe(tenant, request.num_missing_tokens)
        self._count_running(tenant, +1)

    def _pass_turns(self, chosen: Tenant) -> None:
        """Let the turns go round up to the one in which the chosen one, the soonest, starts a request.

        A first request is everybody's due, and is no turn: nobody is let off anything but who is passed by for it.
        """
        is_due = not chosen.num_running
        turns, rounds = (self.idle, 1) if is_due else (self.busy, self._turns_until(chosen))
        tenants = list(turns.values()) if rounds else []
        place = tenants.index(chosen) if rounds else 0
        for tenant in tenants[:place]:
            tenant.owed -= rounds * self.quantum
            turns.move_to_end(tenant.name)
        if not is_due:
            chosen.owed -= rounds * self.quantum
            for tenant in tenants[place + 1 :]:
                tenant.owed -= (rounds - 1) * self.quantum

    def leave(self, request: Request, was_running: bool) -> None:
        tenant = self.tenants[request.tenant]
        tenant.num_unfinished -= 1
        if was_running:
            self._charge(request)
            self._count_running(tenant, -1)
        elif self.preempted.pop(request.ticket, None) is None:
            del tenant.line[request.request_id]
            self._file(tenant)
        if not tenant.num_unfinished:
            del self.tenants[tenant.name]

    def _count_running(self, tenant: Tenant, change: int) -> None:
        tenant.num_running += change
        self._is_arranged = False
        self._file(tenant)

    def _file(self, tenant: Tenant) -> None:
        """To where it belongs: whoever comes there is the last to have its turn."""
        belongs = (self.busy if tenant.num_running else self.idle) if tenant.line else None
        for turns in (self.idle, self.busy):
            if turns is not belongs:
                turns.pop(tenant.name, None)
        if belongs is not None:
            belongs.setdefault(tenant.name, tenant)

    def _charge(self, request: Request) -> None:
        """Its tokens since it was charged last; the one it started with has paid for the prompt."""
        if num_tokens := request.num_output_tokens - request.num_charged_tokens:
            self._owe(self.tenants[request.tenant], num_tokens)
            request.num_charged_tokens = request.num_output_tokens

    def _owe(self, tenant: Tenant, num_tokens: int) -> None:
        was_its_turn = tenant.owed < 0
        tenant.owed = min(self.most_turns * self.quantum, tenant.owed + num_tokens / tenant.weight)
        if was_its_turn and tenant.owed >= 0 and tenant.name in self.busy:
            self.busy.move_to_end(tenant.name)

    def arrange(self, running: list[Request]) -> None:
        if self.idle or self.busy:
            for request in running:
                self._charge(request)
        if self._is_arranged:
            return
        running.sort(key=attrgetter("ticket"))
        numbers: dict[str, count[int]] = {}
        for request in running:
            number = next(numbers.setdefault(request.tenant, count()))
            request.rank = (number / self.tenants[request.tenant].weight, request.ticket)
        running.sort(key=attrgetter("rank"))
        self._is_arranged = True

    def first(self, unfinished: Iterable[Request]) -> Request | None:
        started = [request for request in unfinished if request.ticket != NEVER]
        return min(started, key=attrgetter("ticket"), default=None)

    def lines(self, waiting: OrderedDict[str, Request]) -> Sequence[Sequence[Request]]:
        preempted = [request for _, request in sorted(self.preempted.items())]
        return (preempted, *(list(tenant.line.values()) for tenant in self.tenants.values()))

    def place(self, request: Request) -> tuple[float, int]:
        return (request.ticket, request.arrival)
