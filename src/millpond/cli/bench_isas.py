"""`millpond bench isas`: the kernels of each instruction set that this processor has, side by side."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import examples, parse_counts

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.runner.bench_isas import IsaRow

HELP = """Compare the kernels of each instruction set that this processor has, on one core.

One linear layer whose weights fit a core's own cache is computed by each of them in turn, many times. A ratio is that
of two runs one after the other, the median of the rounds, with its quartiles; 1 is the portable kernels.

The portable kernels use the widest vectors there are. NUMBA_CPU_FEATURES (LLVM's "+avx2,-avx512f,...") shows what a
processor without some of them would get."""

EXAMPLES = examples(
    "millpond bench isas",
    "millpond bench isas --weights 4-bit --rows 1,16,128 --rounds 99",
    "millpond bench isas --json",
)


def register(group: typer.Typer) -> None:
    group.command("isas", help=HELP, epilog=EXAMPLES)(isas)


def as_table(rows: list[IsaRow]) -> Table:
    """The result for a person."""
    from rich.table import Table

    table = Table("weights", "rows", "kernels", "G operations/s", "to portable", "quartiles")
    for index in (1, 3, 4, 5):
        table.columns[index].justify = "right"
    for row in rows:
        spread = f"{row.ratio_low:.2f} - {row.ratio_high:.2f}"
        speed = f"{row.operations_s / 1e9:.0f}"
        table.add_row(row.weights, str(row.rows), row.isa, speed, f"{row.ratio:.2f}", spread)
    return table


def isas(
    weights: Annotated[
        str, typer.Option("--weights", metavar="KIND,KIND", help="Of 4-bit, 8-bit, bfloat16.")
    ] = "4-bit,8-bit,bfloat16",
    rows: Annotated[str, typer.Option("--rows", metavar="N,N", help="Rows that go through the layer.")] = "1,16,128",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each; the medians count.")] = 49,
    as_json: Annotated[bool, typer.Option("--json", help="Print one list, an object for each line.")] = False,
) -> None:
    from millpond.cli.progress import counting_bar
    from millpond.runner.bench_isas import measure_isas, plan_of

    plan = plan_of(
        tuple(each.strip() for each in weights.split(",") if each.strip()), parse_counts(rows, "--rows"), rounds
    )
    with counting_bar(plan.num_measurements) as notify:
        result = measure_isas(plan, time.thread_time, notify)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in result]))
        return
    from rich.console import Console

    Console().print(as_table(result))
