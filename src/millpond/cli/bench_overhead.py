"""`millpond bench overhead`: what a step costs beside its kernels, and what HTTP costs beside the engine."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli import loading
from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    Dtype,
    Isa,
    KVDtype,
    KVMemory,
    ModelOption,
    Quantize,
    Threads,
    examples,
    parse_counts,
)
from millpond.cli.settings import Settings
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.engine.engine import Engine
    from millpond.lab.bench_http import HttpRow, StreamLoad
    from millpond.lab.bench_overhead import StepRow

HELP = """Measure the time that is not spent in kernels: each part of a decode step, and HTTP beside the engine alone.

The first table has the median microseconds of every part of a step in which all sequences decode, from prompts of 128
tokens; `outside` is the share of the step that is not the forward pass. The second is the output of many streamed
completions, from a server and a client in processes of their own, beside the same load with no server, in turns;
`client` is the share of a core that the client takes from both."""

EXAMPLES = examples(
    "millpond bench overhead",
    "millpond bench overhead --sequences 1,64 --streams 0",
    "millpond bench overhead --sequences '' --streams 64 --rounds 5 --json",
)


def register(group: typer.Typer) -> None:
    group.command("overhead", help=HELP, epilog=EXAMPLES)(overhead)


def steps_table(rows: list[StepRow]) -> Table:
    """The parts of a step for a person, in microseconds."""
    from rich import box
    from rich.table import Table

    from millpond.lab.bench_overhead import PARTS

    table = Table("seqs", *PARTS, "step", "outside", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        parts = [f"{1e6 * seconds:.0f}" for seconds in row.parts.values()]
        table.add_row(str(row.num_sequences), *parts, f"{1e6 * row.step:.0f}", f"{100 * row.outside:.1f}%")
    return table


def http_table(row: HttpRow) -> Table:
    """HTTP beside the engine alone for a person."""
    from rich.table import Table

    table = Table("streams", "engine tok/s", "HTTP tok/s", "ratio", "rounds", "client")
    for column in table.columns:
        column.justify = "right"
    spread = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}"
    speeds = f"{row.in_process_tok_s:.0f}", f"{row.http_tok_s:.0f}"
    table.add_row(str(row.num_streams), *speeds, f"{row.ratio:.2f}", spread, f"{100 * row.client_cpu:.0f}%")
    return table


def serve_command(model: str, config: EngineConfig) -> list[str]:
    """The server with the same settings, on a free loopback port."""
    flags = ["--port", "0", "--log-level", "warning"]
    flags += ["--dtype", config.dtype, "--kv-dtype", config.kv_dtype, "--quantize", config.quantize]
    flags += ["--isa", config.isa]
    for name in ("max_num_seqs", "kv_memory", "threads"):
        if (value := getattr(config, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return [sys.executable, "-m", "millpond.cli", "serve", model, *flags]


def measure(
    engine: Engine, command: list[str], sequences: tuple[int, ...], load: StreamLoad, rounds: int
) -> tuple[list[StepRow], HttpRow | None]:
    """Both measurements under a progress bar on standard error; None for HTTP with no stream."""
    from millpond.cli.progress import counting_bar
    from millpond.lab.bench_http import measure_http, serving
    from millpond.lab.bench_overhead import measure_steps

    steps = []
    with counting_bar(len(sequences) + (rounds + 2 if load.num_streams else 0)) as notify:
        for num_sequences in sequences:
            notify(f"decode, {num_sequences} sequences")
            steps.append(measure_steps(engine, num_sequences, rounds, time.perf_counter))
        if not load.num_streams:
            return steps, None
        notify("starting a server")
        with serving(command) as url:
            return steps, measure_http(engine, url, load, rounds, time.perf_counter, notify)


def overhead(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    sequences: Annotated[
        str, typer.Option("--sequences", metavar="N,N", help='Numbers of sequences; "" for none.')
    ] = "1,4,16,64",
    streams: Annotated[int, typer.Option("--streams", min=0, help="Streams over HTTP; 0 for none.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of each stream.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count.")] = 3,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    kv_memory: KVMemory = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object with steps and http.")] = False,
) -> None:
    from millpond.lab.bench_http import StreamLoad

    counts = parse_counts(sequences, "--sequences")
    slots = max(DEFAULTS.max_num_seqs, *counts, streams)
    config = EngineConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        max_num_seqs=slots,
        kv_memory=kv_memory,
        threads=threads,
        isa=isa,
    )
    engine = loading.open_engine(model, config, context.ensure_object(Settings))
    load = StreamLoad(num_streams=streams, max_tokens=max_tokens)
    steps, http = measure(engine, serve_command(model, config), counts, load, rounds)
    if as_json:
        result = {"steps": [row.as_json() for row in steps], "http": http and http.as_json()}
        typer.echo(json.dumps(result))
        return
    from rich.console import Console

    if steps:
        Console().print(steps_table(steps))
    if http is not None:
        Console().print(http_table(http))
