"""`millpond sweep config`: a grid of settings on the simulator, and which of them to take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli import traffic
from millpond.cli.options import MOST_BLOCKS, Plot, examples, parse_counts

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.config_sweep import Grid, Point
    from millpond.lab.cost_model import CostModel
    from millpond.lab.latency import Slo
    from millpond.lab.workload import WorkloadRequest

    Workloads = Mapping[float | None, Sequence[WorkloadRequest]]  # by rate; None: a trace

HELP = (
    """Run a workload on the simulator at every setting of a grid and at several rates: throughput against p99 TTFT.

The table has every setting at the highest rate, fastest first. A star marks the Pareto front: at some rate no other
point has more throughput and a p99 TTFT as short. The advice is the point with the most goodput where an SLO is given,
otherwise the one with the shortest p99 TTFT within 5 % of the most throughput; of points within 1 % of it, the one with
the smallest setting.

Rates around what the engine can serve tell settings apart: below, throughput is the rate itself; far above, all
requests do is wait.

"""
    + f"{traffic.LENGTHS_HELP} {traffic.TRACE_HELP}"
)

EXAMPLES = examples(
    "millpond sweep config --slots 8,16,32,64 --budgets 128,512 --plot front.png",
    "millpond sweep config --pool-tokens 2048,4096,8192 --reserves 0,4 --rates 7",
    "millpond sweep config --cost steps.jsonl --trace requests.jsonl --slots 32,64 --ttft-slo 1 --itl-slo 0.1 --json",
)


# The fields of a setting, short enough for five of them and the figures to fit a terminal.
HEADINGS = {"pool_tokens": "pool", "slots": "slots", "budget": "budget", "block_size": "block", "reserve": "reserve"}


def register(group: typer.Typer) -> None:
    group.command("config", help=HELP, epilog=EXAMPLES)(config)


def parse_rates(text: str) -> tuple[float, ...]:
    """Numbers above 0 from "4,6.5", in rising order, each once; the workload says what is too low."""
    try:
        rates = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise typer.BadParameter(
            f"{text[:40]!r} is not a list of numbers (say 4,6.5)", param_hint="'--rates'"
        ) from None
    if not rates:
        raise typer.BadParameter("name at least one rate (say 4,6.5)", param_hint="'--rates'")
    if not all(rate > 0.0 for rate in rates):
        raise typer.BadParameter(f"{text[:40]!r} holds a rate that is not above 0", param_hint="'--rates'")
    return tuple(rates)


def run(grid: Grid, workloads: Workloads, cost: CostModel, slo: Slo) -> list[Point]:
    """Every setting at every rate, under a progress bar on standard error."""
    from millpond.cli.progress import counting_bar
    from millpond.lab.config_sweep import sweep_configs

    with counting_bar(len(grid.settings) * len(workloads)) as notify:
        return sweep_configs(grid, workloads, cost, slo, notify)


def as_table(points: Sequence[Point], swept: Sequence[str]) -> Table:
    """A row for each setting at the highest rate, fastest first; a star for those on the Pareto front at any rate."""
    from rich import box
    from rich.table import Table

    from millpond.lab.config_sweep import choose, pareto

    front, chosen = {point.setting for point in pareto(points)}, choose(points).setting
    good = points[0].goodput_s is not None
    names = [HEADINGS[name] for name in swept]
    columns = [
        "",
        *names,
        "tok/s",
        "TTFT",
        "ITL",
        "preempted",
        "used",
        *(["good"] if good else []),
    ]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    at_last = [point for point in points if point.rate == points[-1].rate]
    for point in sorted(at_last, key=lambda each: (-each.output_tok_s, each.ttft_p99)):
        style = "bold" if point.setting == chosen else None
        table.add_row("*" if point.setting in front else "", *cells(point, swept), style=style)
    return table


def heading(points: Sequence[Point]) -> str:
    """What the table's figures are."""
    rate, good = points[-1].rate, points[0].goodput_s is not None
    load = "" if rate is None else f"at {rate:g} requests a second: "
    return f"{load}p99 TTFT (s), p99 ITL (ms){', good requests a second' * good}"


def cells(point: Point, swept: Sequence[str]) -> list[str]:
    """One row of the table but for its star."""
    setting = [str(getattr(point.setting, name)) for name in swept]
    waits = [f"{point.ttft_p99:.2f}", f"{1e3 * point.itl_p99:.0f}"]
    good = [] if point.goodput_s is None else [f"{point.goodput_s:.2f}"]
    return [*setting, f"{point.output_tok_s:.0f}", *waits, str(point.preemptions), f"{point.used_share:.0%}", *good]


def config(
    context: typer.Context,
    pool_tokens: Annotated[
        str, typer.Option("--pool-tokens", metavar="N,N", help="Sizes of the K/V pool, in tokens that it holds.")
    ] = "16384",
    slots: Annotated[str, typer.Option("--slots", metavar="N,N", help="Numbers of slots.")] = "8,16,32,64",
    budgets: Annotated[str, typer.Option("--budgets", metavar="N,N", help="Most tokens of one step.")] = "128,512",
    block_sizes: Annotated[str, typer.Option("--block-sizes", metavar="N,N", help="Tokens in a block.")] = "16",
    reserves: Annotated[str, typer.Option("--reserves", metavar="N,N", help="Blocks kept from newcomers.")] = "0",
    requests: traffic.Requests = 500,
    rates: Annotated[
        str, typer.Option("--rates", metavar="R,R", help="Requests a second, each a workload of its own.")
    ] = "4,5,6,7",
    burstiness: traffic.Burstiness = 1.0,
    prompt_tokens: traffic.PromptTokens = traffic.PROMPT_TOKENS,
    max_tokens: traffic.MaxTokens = traffic.MAX_TOKENS,
    seed: traffic.Seed = 0,
    trace: traffic.Trace = None,
    cost: traffic.Cost = None,
    ttft_slo: traffic.TtftSlo = None,
    itl_slo: traffic.ItlSlo = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, with every setting.")] = False,
) -> None:
    from millpond.lab.config_sweep import Grid

    grid = Grid(
        pool_tokens=parse_counts(pool_tokens, "--pool-tokens", most=MOST_BLOCKS),
        slots=parse_counts(slots, "--slots"),
        budgets=parse_counts(budgets, "--budgets"),
        block_sizes=parse_counts(block_sizes, "--block-sizes"),
        reserves=parse_counts(reserves, "--reserves", least=0, most=MOST_BLOCKS),
    )
    workloads: dict[float | None, Sequence[WorkloadRequest]] = {}
    if trace is not None:
        workloads[None] = traffic.traced_workload(context, trace)
    for rate in parse_rates(rates) if trace is None else ():
        drawn = requests, prompt_tokens, max_tokens, seed
        workloads[rate] = traffic.drawn_workload(*drawn, rate=rate, burstiness=burstiness)
    model = traffic.cost_model(cost)
    points = run(grid, workloads, model, traffic.slo_of(ttft_slo, itl_slo))
    if as_json:
        typer.echo(json.dumps(as_object(points, grid.swept, model)))
    else:
        show(points, grid.swept)
    if plot is not None:
        from millpond.lab.config_plot import draw

        draw(points, grid.swept, plot)


def show(points: Sequence[Point], swept: Sequence[str]) -> None:
    """The table and the advice."""
    from rich.console import Console

    from millpond.lab.config_sweep import advise

    typer.echo(heading(points))
    Console().print(as_table(points, swept))
    typer.echo(advise(points, swept))


def as_object(points: Sequence[Point], swept: Sequence[str], cost: CostModel) -> dict[str, object]:
    """What --json prints: every setting in the grid's order, the Pareto front by throughput, the advice."""
    from millpond.lab.config_sweep import advise, choose, pareto

    return {
        "settings": [point.as_json() for point in points],
        "pareto": [point.setting._asdict() for point in pareto(points)],
        "chosen": choose(points).setting._asdict(),
        "advice": advise(points, swept),
        "cost": cost.as_json(),
    }
