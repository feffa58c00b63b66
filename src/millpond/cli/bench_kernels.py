"""`millpond bench kernels`: every phase of a step against what this machine allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli import loading
from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    Dtype,
    Isa,
    KVDtype,
    ModelOption,
    Plot,
    Quantize,
    Threads,
    examples,
    parse_counts,
)
from millpond.cli.settings import Settings
from millpond.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.config import EngineConfig
    from millpond.runner.bench_kernels import KernelPlan, KernelReport, StepReport
    from millpond.runner.model_runner import ModelRunner

HELP = """Measure this machine, then each phase of a step against its own floor.

The machine: bytes read a second by all threads, from their own caches, the shared one and memory, and in random pieces
of 2 KB; products summed a second, of 8-bit integers, bfloat16 and float32, by the chosen kernels' own instructions.

A phase is timed in its place in a whole step, all layers together, median of the repetitions. Its floor is the largest
of its weights and K/V at the memory's speed, its rows at the caches' speed, and its products at the dot rate: 100 % of
floor is as fast as this machine allows. Each decode step reads K/V from all over the pool."""

EXAMPLES = examples(
    "millpond bench kernels",
    'millpond bench kernels --decode 1,64 --context 160 --prefill ""',
    'millpond bench kernels --shape llama-1b --decode 1 --context 160 --prefill ""',
    "millpond bench kernels --threads 1 --json",
    "millpond bench kernels --plot roofline.png",
)

DISTURBED = 120  # percent of floor: a phase faster than the machine


def register(group: typer.Typer) -> None:
    group.command("kernels", help=HELP, epilog=EXAMPLES)(kernels)


def machine_table(report: KernelReport) -> Table:
    """The machine's rates for a person."""
    from rich.table import Table

    rates = report.machine
    title = f"this machine: {rates.isa} kernels, {rates.threads} thread{'s' * (rates.threads > 1)}"
    table = Table("rate", "", title=title, title_justify="left")
    table.columns[1].justify = "right"
    for size, rate in sorted(rates.reads.items()):
        table.add_row(f"read again and again, {size / 2**20:g} MiB", f"{rate / 1e9:.1f} GB/s")
    table.add_row("read in random pieces of 2 KB", f"{rates.scattered / 1e9:.1f} GB/s")
    for name, rate in rates.dots.items():
        table.add_row(f"products of {name}", f"{rate / 1e9:.0f} G operations/s")
    return table


def steps_table(report: KernelReport) -> Table:
    """Every phase of every step for a person."""
    from rich.table import Table

    table = Table("phase", "rows", "us", "floor us", "% floor", "bound by", "share")
    table.columns[0].no_wrap = True
    for index in (1, 2, 3, 4, 6):
        table.columns[index].justify = "right"
    for step in report.steps:
        add_step(table, step)
    return table


def add_step(table: Table, step: StepReport) -> None:
    """The whole step in a row of its own, and its phases under it."""
    us, least = step.seconds * 1e6, sum(row.floor_us for row in step.phases)
    speed = f"{step.shape.rows / step.seconds:.0f} tok/s"
    whole = (str(step.shape.rows), f"{us:.0f}", f"{least:.0f}", f"{100 * least / us:.0f}", speed, "")
    table.add_row(step.shape.name, *whole, style="bold")
    for row in step.phases:
        floor = (f"{row.floor_us:.0f}", f"{row.percent_of_floor:.0f}", row.bound_by) if row.bound_by else ("", "", "")
        table.add_row(f"  {row.phase}", str(row.rows), f"{row.us:.0f}", *floor, f"{row.share:.1%}")
    table.add_section()


def bandwidth_lines(report: KernelReport) -> Iterator[str]:
    """A sentence for each step that memory bounds."""
    for step in report.steps:
        if (found := step.bandwidth) is not None:
            size, rate = f"{found.num_bytes / 1e6:.0f} MB", f"{found.rate / 1e9:.1f} GB/s"
            yield f"{step.shape.name}: {size} a step, at {found.percent:.0f} % of the {rate} of plain reads"


def builder(model: str, shape: str | None, settings: Settings) -> Callable[[EngineConfig], ModelRunner]:
    """What makes the runner: of random weights where a shape is named, else of the model's file, fetched if need be."""
    from millpond.build import build_model_runner, build_random_runner
    from millpond.model.random_weights import SHAPES

    if shape is None:
        path = loading.fetch_model(model, settings)
        return lambda config: build_model_runner(path, config)
    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    return lambda config: build_random_runner(SHAPES[shape], config)


def measure(build: Callable[[EngineConfig], ModelRunner], plan: KernelPlan, config: EngineConfig) -> KernelReport:
    """Carry out the plan under a progress bar on standard error."""
    from millpond.cli.progress import counting_bar
    from millpond.runner.bench_kernels import measure_kernels

    with counting_bar(plan.num_measurements) as notify:
        return measure_kernels(build, config, plan, notify)


def kernels(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Random weights of this shape, not a model: smollm2-135m or llama-1b.")
    ] = None,
    decode: Annotated[
        str, typer.Option("--decode", metavar="N,N", help='Numbers of sequences; "" for none.')
    ] = "1,4,16,64",
    contexts: Annotated[
        str, typer.Option("--context", metavar="N,N", help="At which positions they decode.")
    ] = "160,1024",
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="N,N", help='Prompt lengths, each in one step; "" for none.')
    ] = "128,512,1024",
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Of each step; the median counts.")] = 9,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, with every rate and phase.")] = False,
    plot: Plot = None,
) -> None:
    from millpond.lab.kernel_plot import draw
    from millpond.runner.bench_kernels import KernelPlan

    plan = KernelPlan(
        parse_counts(decode, "--decode"),
        parse_counts(contexts, "--context"),
        parse_counts(prefill, "--prefill"),
        repetitions,
    )
    config = plan.config(dtype=dtype, kv_dtype=kv_dtype, quantize=quantize, isa=isa, threads=threads)
    report = measure(builder(model, shape, context.ensure_object(Settings)), plan, config)
    if plot is not None:
        draw(report.as_json(), plot)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    from rich.console import Console

    console = Console()
    console.print(machine_table(report))
    console.print(steps_table(report))
    for line in bandwidth_lines(report):
        console.print(line)
    if any(row.percent_of_floor > DISTURBED for step in report.steps for row in step.phases):
        console.print("A phase far above 100 %: something else had the cores while the rates were measured. Run again.")
