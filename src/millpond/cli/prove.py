"""`millpond prove`: the scheduler's invariants in every reachable state of small pools, and faults to be found."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import DEFAULTS, Policy, examples

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.explorer import Finding
    from millpond.lab.faults import PlantedFault
    from millpond.lab.proof import Bounds, Proof

HELP = """Prove the scheduler's rules for small pools: visit every state it can reach, check every invariant there.

In each state requests of every length that fits may arrive, any may be aborted, and a step may give any request a
token, its last token, right or wrong guesses or a fault. Only how many are unfinished at once is bounded. From every
state, steps alone must drain the scheduler. With --prefix-cache there are requests that share their text as well, with
--policy priority or fair such of two priorities or tenants. With --any-reserve the reserve is chosen at will before
each admission, as it might be by any rule (--watermark auto). With --disk a disk beside the prefix cache has any of a
head's blocks, now or later. With --whole-prompts no prompt may be cut, as for models that make embeddings alone.

Then faults are planted one by one, and the shortest trace to each is shown. The exit code is 1 if a rule is broken or
a planted fault goes unseen."""

EXAMPLES = examples(
    "millpond prove",
    "millpond prove --prefix-cache",
    "millpond prove --disk",
    "millpond prove --policy priority",
    "millpond prove --any-reserve",
    "millpond prove --whole-prompts",
    "millpond prove --positions 3 --requests 2",
    "millpond prove --deep --json",
)


AnyReserve = Annotated[
    bool, typer.Option("--any-reserve", help="A reserve that is chosen at will, in place of one of each size.")
]


Positions = Annotated[
    int | None,
    typer.Option(
        "--positions", help="Most blocks times block size of a pool [default: 4; deep: 5; cache or policy: 3]"
    ),
]
Requests = Annotated[
    int | None, typer.Option("--requests", help="Most unfinished requests at once [default: 3; cache or policy: 2]")
]
Budget = Annotated[
    int | None,
    typer.Option("--budget", help="Largest budget of tokens per step; 0: none [default: 2; deep: 3; policy: 1]"),
]
Guesses = Annotated[
    int | None,
    typer.Option(
        "--guesses", help="Most guesses a request and step; 0: none [default: 1; deep: 2; cache or policy: 0]"
    ),
]


def register(app: typer.Typer) -> None:
    app.command("prove", help=HELP, epilog=EXAMPLES)(prove)


def as_table(proof: Proof) -> Table:
    """What was explored of each pool, for a person."""
    from rich.table import Table

    table = Table("pool", "schedulers", "states", "transitions", "longest drain")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in proof.rows:
        figures = (row.num_cases, row.num_states, row.num_transitions)
        pool, drain = f"{row.num_blocks} x {row.block_size}", f"{row.longest_drain} steps"
        table.add_row(pool, *(f"{figure:,}" for figure in figures), drain)
    return table


def bounds_text(bounds: Bounds) -> str:
    """The bounds in a sentence."""
    from millpond.lab.world import counted

    slots = f"up to {counted(bounds.slots, 'slot')}"
    budgets = f"no budget or up to {counted(bounds.budget, 'token')} a step" if bounds.budget else "no budget of tokens"
    guesses = f"none or up to {counted(bounds.guesses, 'guess')}" if bounds.guesses else "no guesses"
    order = f", {bounds.policy}" * (bounds.policy != "fcfs")
    reserves = "a reserve chosen at will before each admission" if bounds.any_reserve else "every reserve"
    sharing = ", with the prefix cache" * bounds.prefix_cache + " and a disk" * bounds.disk
    sharing += ", whole prompts" * bounds.whole_prompts
    return (
        f"bounds: blocks x block size up to {bounds.positions}, {slots}, {reserves}, {budgets}, "
        f"{guesses}, {bounds.requests} unfinished at once, any number in all{sharing}{order}"
    )


def verdict(proof: Proof, seconds: float) -> str:
    """One line: what holds, and in how many states."""
    seen = f"{proof.num_states:,} states, {proof.num_transitions:,} transitions, {seconds:.1f} s"
    if proof.finding is None:
        return f"verdict: every invariant holds in every state, and every state drains ({seen})"
    return f"verdict: BROKEN in {proof.finding.case} ({seen})"


def show_trace(finding: Finding) -> None:
    from millpond.lab.story import tell

    for number, line in enumerate(tell(finding), 1):
        typer.echo(f"  {number:2} {line}")


def show(proof: Proof, seconds: float, found: list[tuple[PlantedFault, Finding | None]]) -> None:
    """Everything for a person."""
    from rich.console import Console

    Console().print(as_table(proof))
    typer.echo(bounds_text(proof.bounds))
    typer.echo(verdict(proof, seconds))
    if proof.finding is not None:
        show_trace(proof.finding)
    for fault, finding in found:
        where = f"found in {finding.case}" if finding else "NOT FOUND"
        typer.echo(f"\nplanted: {fault.text}; {where}")
        if finding is not None:
            show_trace(finding)


def show_json(proof: Proof, seconds: float, found: list[tuple[PlantedFault, Finding | None]]) -> None:
    """Everything for a program."""
    from millpond.lab.proof import as_json

    faults = [{**fault.as_json(), "finding": as_json(finding)} for fault, finding in found]
    typer.echo(json.dumps({**proof.as_json(), "seconds": round(seconds, 1), "faults": faults}))


def prove(
    positions: Positions = None,
    slots: Annotated[int | None, typer.Option("--slots", help="Most slots [default: 2; deep: 3]")] = None,
    requests: Requests = None,
    budget: Budget = None,
    guesses: Guesses = None,
    deep: Annotated[bool, typer.Option("--deep", help="Larger bounds: some twenty minutes instead of one.")] = False,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="With the prefix cache, and requests that share their text.")
    ] = False,
    disk: Annotated[bool, typer.Option("--disk", help="The same, with a disk behind it.")] = False,
    policy: Policy = DEFAULTS.policy,
    any_reserve: AnyReserve = False,
    whole_prompts: Annotated[bool, typer.Option("--whole-prompts", help="Each prompt in one step.")] = False,
    faults: Annotated[bool, typer.Option("--faults/--no-faults", help="Plant the faults as well.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object: bounds, pools, states, transitions, verdict, faults.")
    ] = False,
) -> None:
    from millpond.cli.progress import counting_bar
    from millpond.lab import proof as lab
    from millpond.lab.faults import planted_in

    given = {"positions": positions, "slots": slots, "requests": requests, "budget": budget, "guesses": guesses}
    alone = lab.Bounds() if policy == "fcfs" else lab.ORDERING
    if whole_prompts:
        alone = lab.WHOLE if policy == "fcfs" else lab.WHOLE_ORDERING
    preset = lab.DEEP if deep else lab.ON_DISK if disk else lab.SHARING if prefix_cache else alone
    bounds = preset.within(policy, prefix_cache, any_reserve, given, disk, whole_prompts)
    planted = planted_in(policy, bounds.prefix_cache, disk, whole_prompts) if faults else ()
    started = time.perf_counter()
    with counting_bar(lab.num_cases(bounds) + len(planted)) as notify:
        proof = lab.prove(bounds, notify)
        seconds = time.perf_counter() - started
        found = [] if proof.finding else [(fault, lab.find(fault, notify)) for fault in planted]
    if as_json:
        show_json(proof, seconds, found)
    else:
        show(proof, seconds, found)
    if proof.finding is not None or any(finding is None for _, finding in found):
        raise typer.Exit(1)
