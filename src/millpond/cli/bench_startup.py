"""`millpond bench startup`: how long until a server answers."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli import loading
from millpond.cli.options import DEFAULT_MODEL, ModelOption, examples, format_memory
from millpond.cli.settings import Settings

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.bench_startup import StartupResult

HELP = """Measure how long `millpond serve` takes until it answers.

Each start is a process of its own, all with one new cache folder: the first has to compile the kernels and pack the
weights, the later ones find both. The figures of a warm start are medians."""

EXAMPLES = examples("millpond bench startup", "millpond bench startup --rounds 9 --json")


def register(group: typer.Typer) -> None:
    group.command("startup", help=HELP, epilog=EXAMPLES)(startup)


def as_table(result: StartupResult) -> Table:
    """The result for a person."""
    from rich.table import Table

    table = Table("start", "seconds", "processor seconds", "peak memory")
    for index in (1, 2, 3):
        table.columns[index].justify = "right"
    for name, start in result.rows().items():
        table.add_row(name, f"{start.seconds:.2f}", f"{start.cpu_seconds:.2f}", format_memory(start.peak_bytes))
    return table


def startup(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Warm starts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, with cold and warm.")] = False,
) -> None:
    path = loading.fetch_model(model, context.ensure_object(Settings))
    from millpond.cli.progress import counting_bar
    from millpond.lab.bench_startup import measure_startup

    with counting_bar(1 + rounds) as notify:
        result = measure_startup(path, rounds, os.environ, time.perf_counter, notify)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
        return
    from rich.console import Console

    Console().print(as_table(result))
