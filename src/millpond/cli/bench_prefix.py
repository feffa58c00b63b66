"""`millpond bench prefix`: what the prefix cache saves where requests begin alike, and costs where they do not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, cast

import typer

from millpond.cli import loading
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
    examples,
    format_memory,
    parse_counts,
    parse_folder,
)
from millpond.cli.settings import Settings
from millpond.cli.traffic import is_given
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.core.disk_prefixes import DiskPrefixes
    from millpond.engine.engine import Engine
    from millpond.lab.bench_prefix import PrefixRow
    from millpond.lab.bench_restart import RestartBench, RestartRow
    from millpond.runner.model_runner import ModelRunner

HELP = """Measure the prefix cache: the same work without it and with it, in turns, the cache empty each time.

chat       four conversations at once, six turns each of 64 tokens asked and 48 answered
shared     16 requests at once, 512 tokens in common and 32 of their own, 64 tokens of output
children   eight answers of 64 tokens to one prompt of 256
strangers  W1, 64 mixed requests that have nothing in common

Speeds are output tokens per second of the whole, TTFT is the median of the requests, both median of the rounds after
one that is not counted; gain compares the speeds round by round. An answer that the cache changes ends the measurement.

With --restart it is instead the time to the first token of prompts of --lengths: computed; after a restart, from what
--cache-dir keeps on disk; and from memory.

With --threads 1 the seconds are those of the processor, which other work on the machine does not stretch."""

EXAMPLES = examples(
    "millpond bench prefix",
    "millpond bench prefix --workloads shared --rounds 5 --json",
    "millpond bench prefix --restart",
)


def register(group: typer.Typer) -> None:
    # \b keeps the lines of the help as they are written.
    group.command("prefix", help=HELP.replace("chat   ", "\b\nchat   ", 1), epilog=EXAMPLES)(prefix)


def as_table(rows: list[PrefixRow]) -> Table:
    """The rows for a person; milliseconds and tokens."""
    from rich.table import Table

    table = Table("workload", "prompts", "saved", "TTFT off", "on", "tok/s off", "on", "gain")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        counts = row.prompt_tokens, row.saved_tokens
        speeds = row.plain_tok_s, row.cached_tok_s
        table.add_row(
            row.workload,
            *(str(count) for count in counts),
            *(f"{1e3 * seconds:.0f} ms" for seconds in (row.plain_ttft, row.cached_ttft)),
            *(f"{speed:.0f}" for speed in speeds),
            f"{row.gain:.3f}x",
        )
    return table


def restart_table(rows: list[RestartRow]) -> Table:
    from rich.table import Table

    table = Table("prompt", "loaded", "files", "TTFT computed", "disk", "memory", "gain")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        table.add_row(
            str(row.prompt_tokens),
            str(row.loaded_tokens),
            format_memory(row.disk_bytes),
            *(f"{1e3 * seconds:.0f} ms" for seconds in (row.cold_ttft, row.loaded_ttft, row.pool_ttft)),
            f"{row.gain:.1f}x",
        )
    return table


Workloads = Annotated[str, typer.Option("--workloads", metavar="NAME,NAME", help="Which of them, without --restart.")]


def prefix(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    workloads: Workloads = "chat,shared,children,strangers",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count.")] = 3,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    kv_memory: KVMemory = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    restart: Annotated[bool, typer.Option("--restart", help="Measure what is kept on disk.")] = False,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="N,N", help="Tokens of the prompts of --restart.")
    ] = "512,1500,4000",
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir", parser=parse_folder, metavar="DIR", help="The folder of --restart [default: a temporary one]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with an object for each row.")] = False,
) -> None:
    from millpond.cli.progress import counting_bar
    from millpond.lab.bench_prefix import PrefixBench

    check_use(context, restart)
    counts = parse_counts(lengths, "--lengths")
    names = [name.strip() for name in workloads.split(",") if name.strip()]
    config = EngineConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_memory=kv_memory,
        threads=threads,
        isa=isa,
    )
    settings = context.ensure_object(Settings)
    engine = loading.open_engine(model, config, settings)
    # Threads that wait for one another burn processor time; one alone does not.
    clock = time.process_time if engine.config.threads == 1 else time.perf_counter
    if restart:
        restarted = time_restarts(engine, loading.fetch_model(model, settings), cache_dir, counts, rounds)
        show(restarted, lambda: restart_table(restarted), as_json)
        return
    with counting_bar(len(names)) as notify:
        rows = PrefixBench(engine, clock).run(names, rounds, notify)
    show(rows, lambda: as_table(rows), as_json)


def check_use(context: typer.Context, restart: bool) -> None:
    """Raise BadParameter for an option that this measurement would not look at."""
    for name in ("workloads",) if restart else ("lengths", "cache_dir"):
        if is_given(context, name):
            remedy = "leave out one of the two" if restart else "add it, or leave this out"
            kind = "is not used with --restart" if restart else "is used with --restart alone"
            raise typer.BadParameter(f"it {kind}: {remedy}", param_hint=f"'--{name.replace('_', '-')}'")


@contextmanager
def folder_in(given: Path | None) -> Iterator[Path]:
    """A folder that is empty at first and gone afterwards, in the given one or where temporary files are."""
    from millpond.load.prefix_folder import check_writable

    if given is not None:
        check_writable(given)
    with TemporaryDirectory(prefix="millpond-prefixes-", dir=given) as folder:
        yield Path(folder)


def time_restarts(
    engine: Engine, model: Path, cache_dir: Path | None, counts: Sequence[int], rounds: int
) -> list[RestartRow]:
    from millpond.cli.progress import counting_bar

    with counting_bar(len(counts)) as notify, folder_in(cache_dir) as folder:
        return restart_bench(engine, model, folder).run(counts, rounds, notify)


def restart_bench(engine: Engine, model: Path, folder: Path) -> RestartBench:
    from millpond.build import open_disk
    from millpond.lab.bench_restart import RestartBench
    from millpond.model.checkpoint import open_checkpoint

    paths = open_checkpoint(model)[0].paths

    def open_again() -> DiskPrefixes:
        return open_disk(folder, paths, engine.config, cast("ModelRunner", engine.runner))

    return RestartBench(engine, open_again, time.perf_counter)


def show(rows: Sequence[PrefixRow | RestartRow], table: Callable[[], Table], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([row.as_json() for row in rows]))
        return
    from rich.console import Console

    Console().print(table())
