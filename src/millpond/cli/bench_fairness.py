"""`millpond bench fairness`: what a flood of one tenant does to single requests of others, under each policy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import DEFAULTS, MaxNumBatchedTokens, Plot, Slots, examples
from millpond.config import POLICIES

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.bench_fairness import FairnessRow, Flood

HELP = """Count how many steps single requests of other tenants wait beside one tenant's flood, under each policy.

The real scheduler, with no model: all of the flood comes at once, and a single request every so many steps until the
flood is done. For the priority policy these have the number 0, the flood 10. The bound is what the fair policy
promises: one step, and the steps in which its own prompt and that of each other tenant's first request are computed."""

EXAMPLES = examples("millpond bench fairness", "millpond bench fairness --flood 5000 --slots 16 --plot fairness.png")


def register(group: typer.Typer) -> None:
    group.command("fairness", help=HELP, epilog=EXAMPLES)(fairness)


def as_table(flood: Flood, rows: list[FairnessRow]) -> Table:
    """A row for each policy; delays in steps to the first token."""
    from rich.table import Table

    table = Table("policy", "singles", "p50", "p99", "most", "bound", "steps", "displaced", "recomputed")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        delays = [row.quantile(share) for share in (0.5, 0.99, 1.0)]
        bound = str(flood.most_steps) if row.policy == "fair" else ""
        figures = [len(row.delays), *delays, bound, row.num_steps, row.displaced]
        table.add_row(row.policy, *map(str, figures), f"{row.recompute_share:.1%}")
    return table


def fairness(
    flood: Annotated[int, typer.Option("--flood", min=1, max=100_000, help="Requests of the flood.")] = 1000,
    every: Annotated[int, typer.Option("--every", min=1, help="Steps from one single request to the next.")] = 25,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, max=100_000, help="Of every prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=100_000, help="Of every answer.")] = 64,
    slots: Slots = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with an object for each policy.")] = False,
) -> None:
    from millpond.cli.progress import counting_bar
    from millpond.lab import bench_fairness as lab

    sizes = lab.Flood(flood, every, prompt_tokens, max_tokens, slots, max_num_batched_tokens)
    with counting_bar(len(POLICIES)) as notify:
        rows = lab.run_all(sizes, POLICIES, notify)
    if as_json:
        typer.echo(json.dumps([{**row.as_json(), "bound": sizes.most_steps} for row in rows]))
    else:
        from rich.console import Console

        Console().print(as_table(sizes, rows))
    if plot is not None:
        lab.draw(sizes, rows, plot)
