"""`millpond sweep reserve`: the reserve that chooses itself against every fixed one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import examples

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.reserve_contest import Result

HELP = """Compare --watermark auto with every fixed reserve, on five unlike kinds of traffic and pools tight for them.

bursts: 20 to 60 requests at once every 15 to 35 seconds, prompts of 16-64 tokens, outputs of 140-180. shift: prompts
of 16-64 and outputs of 150-250, then prompts of 128-256 and outputs of 16-64. equal: prompts of 32-160, outputs of 192.
tails: prompts of 16-64, outputs lognormal:48:1.2:1024. documents: prompts of 256-768, outputs of 8-64.

Fixed reserves go by a thirty-second of the pool up to half of it, then by a sixteenth. Work is the positions forwarded
and 3 for each iteration, of all seeds together. The best fixed reserve is known afterwards; auto knows nothing."""

EXAMPLES = examples(
    "millpond sweep reserve",
    "millpond sweep reserve --kinds bursts,tails --requests 1000 --seeds 2 --json",
)


def register(app: typer.Typer) -> None:
    app.command("reserve", help=HELP, epilog=EXAMPLES)(reserve)


def as_table(results: Sequence[Result]) -> Table:
    from rich.table import Table

    table = Table("traffic", "best fixed", "its work", "auto's", "against it", "against 0")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for each in results:
        best, against_none = each.best_reserve, each.auto_work / each.fixed_work[0] - 1.0
        figures = (f"{each.fixed_work[best]:,}", f"{each.auto_work:,}", f"{each.difference:+.1%}")
        table.add_row(each.kind, str(best), *figures, f"{against_none:+.1%}")
    return table


def reserve(
    kinds: Annotated[
        str, typer.Option("--kinds", metavar="NAME,NAME", help="Which kinds of traffic.")
    ] = "bursts,shift,equal,tails,documents",
    requests: Annotated[int, typer.Option("--requests", min=1, max=100_000, help="Requests of a run.")] = 240,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="How many seeds are run.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="The first of them.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with an object for each kind.")] = False,
) -> None:
    from millpond.cli.progress import counting_bar
    from millpond.lab.reserve_contest import KINDS, contest, fixed_reserves

    names = [name.strip() for name in kinds.split(",") if name.strip()]
    if unknown := [name for name in names if name not in KINDS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(KINDS)}", param_hint="'--kinds'")
    if not names:
        raise typer.BadParameter(f"name at least one of {', '.join(KINDS)}", param_hint="'--kinds'")
    runs = seeds * sum(len(fixed_reserves(KINDS[name].num_blocks)) + 1 for name in names)
    with counting_bar(runs) as notify:
        results = [contest(name, range(seed, seed + seeds), requests, notify=notify) for name in names]
    if as_json:
        typer.echo(json.dumps([each.as_json() for each in results]))
        return
    from rich.console import Console

    Console().print(as_table(results))
