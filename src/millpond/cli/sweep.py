"""`millpond sweep`: one workload under several settings of the scheduler, with no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli import sweep_config, sweep_reserve, traffic
from millpond.cli.options import MOST_BLOCKS, MOST_COUNT, Blocks, Plot, Slots, examples, parse_counts
from millpond.config import AUTO
from millpond.lab.lengths import Lengths

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.batchbench import ReserveChoice, WatermarkPoint, WatermarkSweep

WATERMARK_HELP = (
    """Run one workload under each reserve, on the real scheduler with no model, and say which to choose.

A reserve (--watermark-blocks of `millpond serve`) keeps blocks back from newcomers, so that running requests have room
to grow: fewer are preempted and computed again, and more wait. auto is what --watermark auto makes of the requests.
Iterations are steps, one that only releases counts. thrashed: preempted before a block of new tokens; recomputed:
positions that resumed requests forwarded again.

The choice is the reserve whose run is the least work: the positions forwarded, and 3 for each iteration.

"""
    + f"{traffic.LENGTHS_HELP} {traffic.TRACE_HELP}"
)

WATERMARK_EXAMPLES = examples(
    "millpond sweep watermark",
    "millpond sweep watermark --max-tokens 19 --slots 6 --blocks 16 --reserves 0,3",
    "millpond sweep watermark --requests 200 --prompt-tokens 8-64 --max-tokens 4-128 --slots 16 --blocks 128 --json",
    "millpond sweep watermark --trace requests.jsonl --block-size 16 --blocks 400 --slots 32 --plot sweep.png",
)

PROMPT_TOKENS, MAX_TOKENS = Lengths((6,)), Lengths((10,))

StepTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", min=1, help="Most tokens of a step [default: no limit]")
]
StepSeconds = Annotated[
    float, typer.Option("--step-seconds", help="How long a step takes on the clock of a trace's arrivals.")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(sweep)
    group.command("watermark", help=WATERMARK_HELP, epilog=WATERMARK_EXAMPLES)(watermark)
    sweep_config.register(group)
    sweep_reserve.register(group)
    app.add_typer(group, name="sweep")


def sweep(context: typer.Context) -> None:
    """Try settings of the scheduler on a workload, with no model."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def as_table(points: Sequence[WatermarkPoint], chosen: WatermarkPoint) -> Table:
    """The points for a person, the chosen one marked."""
    from rich.table import Table

    table = Table("reserve", "preempted", "thrashed", "iterations", "forwarded", "recomputed", "done")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for point in points:
        is_chosen = point is chosen
        table.add_row(
            f"{'* ' if is_chosen else ''}{point.watermark_blocks}",
            str(point.preemptions),
            str(point.thrashed_admissions),
            str(point.iterations),
            str(point.forward_tokens),
            f"{point.recompute_share:.1%}",
            str(point.completed),
            style="bold" if is_chosen else None,
        )
    return table


def parse_reserves(text: str) -> tuple[ReserveChoice, ...]:
    """Blocks and auto from "0,1,auto", in their order."""
    words = [word.strip() for word in text.split(",")]
    counts = iter(parse_counts(",".join(w for w in words if w != AUTO), "--reserves", least=0, most=MOST_BLOCKS))
    return tuple("auto" if word == AUTO else next(counts) for word in words if word)


def measure(plan: WatermarkSweep, reserves: Sequence[ReserveChoice]) -> list[WatermarkPoint]:
    """Carry out the sweep under a progress bar on standard error."""
    from millpond.cli.progress import counting_bar
    from millpond.lab.batchbench import sweep_watermarks

    with counting_bar(len(reserves)) as notify:
        return sweep_watermarks(plan, reserves, notify)


def watermark(
    context: typer.Context,
    requests: traffic.Requests = 8,
    prompt_tokens: traffic.PromptTokens = PROMPT_TOKENS,
    max_tokens: traffic.MaxTokens = MAX_TOKENS,
    seed: traffic.Seed = 0,
    trace: traffic.Trace = None,
    slots: Slots = 3,
    blocks: Blocks = 8,
    block_size: Annotated[int, typer.Option("--block-size", min=1, max=MOST_COUNT, help="Tokens in a block.")] = 4,
    reserves: Annotated[
        str, typer.Option("--reserves", metavar="N,N,auto", help="To try, in blocks, and auto.")
    ] = "0,1,2,3,auto",
    max_num_batched_tokens: StepTokens = None,
    step_seconds: StepSeconds = 0.05,
    audit: Annotated[bool, typer.Option("--audit", help="Check every invariant after every step (slow).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with an object for each reserve.")] = False,
    plot: Plot = None,
) -> None:
    from millpond.lab.batchbench import WatermarkSweep, choose_reserve

    plan = WatermarkSweep(
        requests=traffic.drawn_workload(requests, prompt_tokens, max_tokens, seed)
        if trace is None
        else traffic.traced_workload(context, trace),
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=slots,
        max_num_batched_tokens=max_num_batched_tokens,
        step_seconds=step_seconds,
        audit=audit,
    )
    points = measure(plan, parse_reserves(reserves))
    chosen, why = choose_reserve(points)
    if as_json:
        typer.echo(json.dumps([point.as_json() for point in points]))
        typer.echo(why, err=True)
    else:
        from rich.console import Console

        Console().print(as_table(points, chosen))
        typer.echo(why)
    if plot is not None:
        from millpond.lab.watermark_plot import draw_sweep

        draw_sweep(points, chosen, why, plot)
