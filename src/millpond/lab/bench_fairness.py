"""A flood of one tenant, and single requests of others: how many steps these wait, under each policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millpond.core.block_pool import blocks_for_length
from millpond.core.policies import make_policy
from millpond.core.request import Request
from millpond.core.scheduler import Scheduler
from millpond.errors import ConfigError
from millpond.lab.picture import new_figure, save
from millpond.lab.stepping import ChecksumRunner, StepLoop

FLOOD_PRIORITY = 10  # so that a single request, which has 0, passes it for ten times the steps of ageing
COLORS = {"fcfs": "darkorange", "priority": "steelblue", "fair": "seagreen"}


@dataclass(frozen=True, slots=True)
class Flood:
    """num_requests at once, and every so many steps a single one of a new tenant, for as long as the flood lasts.

    All have prompt_tokens and output_tokens. The pool has room for all slots. Single ones have the smaller priority.
    Raises ConfigError where the budget is less than a token for each slot.
    """

    num_requests: int = 1000
    every: int = 25
    prompt_tokens: int = 128
    output_tokens: int = 64
    slots: int = 64
    budget: int = 512
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.budget <= self.slots:
            raise ConfigError(
                f"a budget (--max-num-batched-tokens) of {self.budget} tokens leaves nothing beside {self.slots} slots"
            )

    @property
    def most_steps(self) -> int:
        """What the fair policy promises: from the step after it came to the one that gives its first token.

        Before a tenant's first request go the prompts of the other tenants' first ones, here at most one at a time.
        """
        return 1 + -(-2 * self.prompt_tokens // (self.budget - self.slots))

    def scheduler(self, policy: str) -> Scheduler:
        length = self.prompt_tokens + self.output_tokens
        return Scheduler(
            num_blocks=self.slots * blocks_for_length(length, self.block_size),
            block_size=self.block_size,
            max_num_seqs=self.slots,
            max_num_batched_tokens=self.budget,
            max_model_len=length,
            policy=make_policy(policy, {}),
        )

    def request(self, name: str, tenant: str, priority: int) -> Request:
        prompt = (1,) * self.prompt_tokens
        return Request(name, prompt, self.output_tokens, tenant=tenant, priority=priority)


@dataclass(frozen=True, slots=True)
class FairnessRow:
    """One policy: the step in which each single request came and how many it took to its first token, in pairs."""

    policy: str
    num_steps: int
    displaced: int
    recompute_share: float
    delays: tuple[tuple[int, int], ...]

    def quantile(self, share: float) -> int:
        """The delay that so many of the single requests do not exceed."""
        ordered = sorted(delay for _, delay in self.delays)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(flood: Flood, policy: str) -> FairnessRow:
    """The flood to its last token, step by step, with no model."""
    loop = StepLoop(flood.scheduler(policy), ChecksumRunner())
    scheduler = loop.scheduler
    for number in range(flood.num_requests):
        scheduler.add_request(flood.request(f"f{number}", "flood", FLOOD_PRIORITY))
    came: dict[str, int] = {}
    delays: list[tuple[int, int]] = []
    num_flood, step = flood.num_requests, 0
    while scheduler.has_work:
        if num_flood and step % flood.every == 0 and step:
            name = f"s{len(came)}"
            came[name] = step
            scheduler.add_request(flood.request(name, name, 0))
        _, updates = loop.step()
        step += 1
        for request, token_ids, _ in updates:
            if request.request_id in came and len(request.output_token_ids) == len(token_ids) == 1:
                delays.append((came[request.request_id], step - came[request.request_id]))
            num_flood -= request.tenant == "flood" and request.is_finished
    counters = scheduler.counters
    return FairnessRow(policy, step, counters.displaced, counters.recompute_share, tuple(sorted(delays)))


def run_all(flood: Flood, policies: tuple[str, ...], notify: Callable[[str], None]) -> list[FairnessRow]:
    rows = []
    for policy in policies:
        notify(policy)
        rows.append(run(flood, policy))
    return rows


def draw(flood: Flood, rows: list[FairnessRow], path: Path) -> None:
    """The steps that each single request took to its first token, by when it came; and the promised bound."""
    figure = new_figure(10, 4.5)
    axes = figure.subplots()
    for row in rows:
        steps, delays = zip(*row.delays, strict=True)
        axes.plot(steps, delays, "o-", ms=3, lw=1, color=COLORS[row.policy], label=row.policy, gid=row.policy)
    axes.axhline(flood.most_steps, color="black", lw=1, ls="--", label=f"fair's bound: {flood.most_steps} steps")
    axes.set(yscale="log", xlabel="the step in which it came", ylabel="steps to its first token")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(
        f"single requests of other tenants beside a flood of {flood.num_requests:,}; {flood.slots} slots",
        fontsize=10,
    )
    axes.legend(fontsize=9, frameon=False)
    axes.grid(alpha=0.25)
    save(figure, path)
