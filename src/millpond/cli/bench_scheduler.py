"""`millpond bench scheduler`: what the scheduler costs in a step, with no model."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import examples, parse_counts

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.bench_scheduler import SchedulerRow

HELP = """Measure what the scheduler itself costs in a step, with no model.

Median microseconds of processor time over decode steps in which all running requests get a token, from prompts of 128
tokens in blocks of 16, while the others wait."""

MOST_RUNNING, MOST_WAITING, MOST_STEPS = 4096, 1_000_000, 10_000  # beyond these, gigabytes

EXAMPLES = examples("millpond bench scheduler", "millpond bench scheduler --running 1024 --waiting 100,100000 --json")


def register(group: typer.Typer) -> None:
    group.command("scheduler", help=HELP, epilog=EXAMPLES)(scheduler)


def as_table(rows: list[SchedulerRow]) -> Table:
    """The result for a person, in microseconds."""
    from rich.table import Table

    table = Table("running", "waiting", "schedule", "update", "step")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        times = [f"{1e6 * seconds:.0f}" for seconds in (row.schedule, row.update, row.step)]
        table.add_row(str(row.num_running), str(row.num_waiting), *times)
    return table


def scheduler(
    running: Annotated[str, typer.Option("--running", metavar="N,N", help="Numbers of running requests.")] = "64,256",
    waiting: Annotated[
        str, typer.Option("--waiting", metavar="N,N", help="Numbers of waiting requests.")
    ] = "100,10000",
    steps: Annotated[int, typer.Option("--steps", min=1, max=MOST_STEPS, help="Steps that count.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one list, an object for each line.")] = False,
) -> None:
    from millpond.cli.progress import counting_bar
    from millpond.lab.bench_scheduler import measure_all

    sizes = (
        parse_counts(running, "--running", most=MOST_RUNNING),
        parse_counts(waiting, "--waiting", most=MOST_WAITING),
    )
    with counting_bar(len(sizes[0]) * len(sizes[1])) as notify:
        rows = measure_all(*sizes, steps, time.thread_time, notify)
    if as_json:
        typer.echo(json.dumps([row.as_json() for row in rows]))
        return
    from rich.console import Console

    Console().print(as_table(rows))
