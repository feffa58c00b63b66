"""`millpond bench pace`: what a long prompt does to requests that decode."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli import loading
from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    Dtype,
    Isa,
    ItlTarget,
    KVDtype,
    KVMemory,
    MaxNumBatchedTokens,
    ModelOption,
    Quantize,
    Threads,
    examples,
)
from millpond.cli.settings import Settings
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.bench_pace import PaceRow

HELP = """Measure the time between the tokens of requests that decode, in quiet and while a long prompt is computed.

The streams decode from prompts of 64 tokens; 300 quiet steps are timed, then those until the long prompt has its first
token, and 300 quiet ones again. Milliseconds; `ratio` is that of the two p99, `prefill` the time to that first token in
seconds."""

EXAMPLES = examples(
    "millpond bench pace",
    "millpond bench pace --itl-target 15",
    "millpond bench pace --streams 16 --prompt-tokens 2048 --itl-target 25 --json",
)


def register(group: typer.Typer) -> None:
    group.command("pace", help=HELP, epilog=EXAMPLES)(pace)


def as_table(row: PaceRow) -> Table:
    """The result for a person."""
    from rich.table import Table

    figures = row.as_json()
    names = {
        "streams": "streams",
        "prompt": "prompt_tokens",
        "quiet p50": "quiet_p50_ms",
        "p99": "quiet_p99_ms",
        "beside p50": "beside_p50_ms",
        "p99 ": "beside_p99_ms",
        "ratio": "p99_ratio",
        "prefill": "prefill_seconds",
    }
    table = Table(*names)
    for column in table.columns:
        column.justify = "right"
    table.add_row(*(str(figures[name]) for name in names.values()))
    return table


def pace(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    itl_target: ItlTarget = None,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Requests that decode.")] = 4,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, help="Of the long prompt [default: the longest there is]")
    ] = None,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    kv_memory: KVMemory = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one object.")] = False,
) -> None:
    from millpond.cli.progress import counting_bar
    from millpond.lab.bench_pace import measure_pace

    config = EngineConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        max_num_seqs=max(DEFAULTS.max_num_seqs, streams + 1),
        max_num_batched_tokens=max_num_batched_tokens,
        itl_target=itl_target,
        kv_memory=kv_memory,
        threads=threads,
        isa=isa,
    )
    engine = loading.open_engine(model, config, context.ensure_object(Settings))
    longest = engine.limits.max_total_tokens - 1
    with counting_bar(3) as notify:
        row = measure_pace(engine, streams, prompt_tokens or longest, time.perf_counter, notify)
    if as_json:
        typer.echo(json.dumps(row.as_json()))
        return
    from rich.console import Console

    Console().print(as_table(row))
