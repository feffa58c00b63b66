"""`millpond bench`: how fast this machine is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli import (
    bench_batching,
    bench_fairness,
    bench_isas,
    bench_kernels,
    bench_overhead,
    bench_pace,
    bench_prefix,
    bench_scheduler,
    bench_serve,
    bench_speculative,
    bench_startup,
    loading,
)
from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    Dtype,
    Isa,
    KVDtype,
    KVMemory,
    MaxNumBatchedTokens,
    ModelOption,
    Quantize,
    Threads,
    check_target,
    examples,
    parse_counts,
)
from millpond.cli.settings import Settings
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.engine.engine import Engine
    from millpond.lab.bench_engine import BenchPlan, BenchResult, EngineBench

HELP = """Measure the engine itself, with no server: decode by number of sequences, prefill by prompt length, and W1.

decode   tokens per second over 64 steps in which all sequences decode, from prompts of 128 tokens
prefill  prompt tokens per second up to the first output token of one prompt alone
W1       output tokens per second of 64 requests at once, prompts of 32-256 tokens, outputs of 16-128

Each figure is the median of the rounds, after one round that is not counted."""

EXAMPLES = examples(
    "millpond bench engine",
    "millpond bench engine --decode 1,4 --prefill 128 --no-w1",
    'millpond bench engine --decode 64 --prefill "" --no-w1 --threads 1 --json',
    "millpond bench engine --record steps.jsonl",
)


Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        callback=check_target,
        help="Write each step's shape and seconds (JSONL), for `simulate`.",
    ),
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(bench)
    # \b keeps the lines of the help as they are written.
    group.command("engine", help=HELP.replace("decode  ", "\b\ndecode  ", 1), epilog=EXAMPLES)(engine)
    bench_fairness.register(group)
    bench_kernels.register(group)
    bench_isas.register(group)
    bench_overhead.register(group)
    bench_pace.register(group)
    bench_prefix.register(group)
    bench_scheduler.register(group)
    bench_serve.register(group)
    bench_speculative.register(group)
    bench_startup.register(group)
    bench_batching.register(group)
    app.add_typer(group, name="bench")


def bench(context: typer.Context) -> None:
    """Measure how fast this machine is."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def measure(engine_bench: EngineBench, plan: BenchPlan) -> BenchResult:
    """Carry out the plan under a progress bar on standard error."""
    from millpond.cli.progress import counting_bar

    with counting_bar(plan.num_measurements) as notify:
        return engine_bench.run(plan, notify)


def record_to(path: Path, engine: Engine, engine_bench: EngineBench, plan: BenchPlan) -> BenchResult:
    """Carry out the plan, and write what every step was made of and took."""
    from millpond.lab.step_record import recorded, write_records

    with recorded(engine) as records:
        result = measure(engine_bench, plan)
    write_records(records, path)
    loading.notify(f"{len(records)} steps are in {path}; millpond simulate --cost {path} runs on them")
    return result


def as_table(result: BenchResult) -> Table:
    """The result for a person."""
    from rich.table import Table

    table = Table("measurement", "size", "tok/s")
    table.columns[1].justify = table.columns[2].justify = "right"
    for num_sequences, speed in result.decode_tok_s.items():
        table.add_row("decode", f"{num_sequences} sequences", f"{speed:.0f}")
    for length, speed in result.prefill_tok_s.items():
        table.add_row("prefill", f"{length} tokens", f"{speed:.0f}")
    if result.w1_output_tok_s is not None:
        table.add_row("W1, output", "64 requests", f"{result.w1_output_tok_s:.0f}")
    return table


def engine(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    decode: Annotated[
        str, typer.Option("--decode", metavar="N,N", help='Numbers of sequences; "" for none.')
    ] = "1,4,16,64",
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="N,N", help='Prompt lengths in tokens; "" for none.')
    ] = "128,512,1024",
    w1: Annotated[bool, typer.Option("--w1/--no-w1", help="The mixed workload.")] = True,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count.")] = 3,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    kv_memory: KVMemory = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    record: Record = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print decode_tok_s, prefill_tok_s and w1_output_tok_s.")
    ] = False,
) -> None:
    from millpond.lab.bench_engine import BenchPlan, EngineBench

    plan = BenchPlan(
        decode=parse_counts(decode, "--decode"), prefill=parse_counts(prefill, "--prefill"), w1=w1, rounds=rounds
    )
    slots = max(DEFAULTS.max_num_seqs, *plan.decode, 1)
    config = EngineConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        max_num_seqs=slots,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_memory=kv_memory,
        threads=threads,
        isa=isa,
        prefix_cache=False,  # W1 comes again in each round
    )
    loaded = loading.open_engine(model, config, context.ensure_object(Settings))
    engine_bench = EngineBench(loaded, loaded.limits.vocab_size, time.perf_counter)
    result = measure(engine_bench, plan) if record is None else record_to(record, loaded, engine_bench, plan)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        from rich.console import Console

        Console().print(as_table(result))
