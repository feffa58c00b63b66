"""`millpond bench batching`: static batches against continuous batching."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli import loading, traffic
from millpond.cli.options import (
    DEFAULTS,
    MOST_BLOCKS,
    BlockSize,
    Isa,
    MaxNumBatchedTokens,
    Plot,
    Slots,
    Threads,
    examples,
)
from millpond.cli.settings import Settings
from millpond.config import EngineConfig
from millpond.core.block_pool import blocks_for_length
from millpond.errors import ConfigError
from millpond.lab.lengths import Lengths

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.batch_run import BatchRun
    from millpond.lab.batchbench import BatchBench
    from millpond.lab.workload import WorkloadRequest


HELP = (
    """Run one workload in static batches and in continuous ones, and compare.

A static batch takes as many requests as there are slots, runs every row until its longest is done, and delivers all of
its answers then. A continuous one gives a freed slot away in the same step and delivers an answer with its last token.
Both run on the real scheduler and give the same tokens, which is checked.

Without --model steps are counted; with it they are timed too, each side's run of median duration. With
--threads 1 the seconds are those of the processor, which other work on the machine does not stretch.

issued     positions forwarded
useful     those of them that the requests alone need; waste is the rest
goodput    tokens that were asked for, per step or second
delivered  from the start until a request's answer is there, on average
held       from its last own token to its delivery (head-of-line delay)
inflation  delivered, over the time of the steps that moved it on

"""
    + traffic.LENGTHS_HELP
)

EXAMPLES = examples(
    "millpond bench batching",
    "millpond bench batching --requests 64 --slots 16 --max-tokens 4-256 --plot batching.png",
    "millpond bench batching --model smollm2 --json",
)

PROMPT_TOKENS, MAX_TOKENS = Lengths(range(16, 65), drawn=True), Lengths(range(8, 129), drawn=True)

Model = Annotated[
    str | None, typer.Option("--model", help="Time this model too: a known name, a GGUF file, a folder, or org/repo.")
]
Blocks = Annotated[
    int | None,
    typer.Option("--blocks", min=1, max=MOST_BLOCKS, help="Blocks of the pool [default: all slots at their longest]"),
]


def register(group: typer.Typer) -> None:
    # \b keeps the lines of the help as they are written.
    group.command("batching", help=HELP.replace("issued  ", "\b\nissued  ", 1), epilog=EXAMPLES)(batching)


def as_table(static: Mapping[str, Any], continuous: Mapping[str, Any], unit: str) -> Table:
    """Both runs, as `--json` has them, side by side."""
    from rich.table import Table

    table = Table("", "static", "continuous", "ratio")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    rows = [
        ("steps", "steps", "{:d}"),
        ("issued tokens", "issued_tokens", "{:d}"),
        ("useful tokens", "useful_tokens", "{:d}"),
        ("waste", "waste", "{:.1%}"),
        ("preemptions", "preemptions", "{:d}"),
        (f"goodput, tokens/{unit}", f"goodput_per_{unit}", "{:.2f}"),
        (f"delivered, {unit}s", "mean_delivered", "{:.2f}"),
        (f"held, {unit}s", "mean_head_of_line_delay", "{:.2f}"),
        ("inflation", "mean_inflation", "{:.2f}"),
        ("largest inflation", "max_inflation", "{:.2f}"),
    ]
    if unit == "second":
        rows.insert(1, ("seconds", "duration", "{:.2f}"))
    for name, key, form in rows:
        before, after = static[key], continuous[key]
        table.add_row(name, form.format(before), form.format(after), f"{after / before:.2f}" if before else "")
    return table


def bench_of(
    model: str | None, config: EngineConfig, workload: Sequence[WorkloadRequest], seed: int, settings: Settings
) -> BatchBench:
    """The bench of a model's engine, or of the scheduler alone with a clock that counts its steps."""
    from millpond.core.scheduler import Scheduler
    from millpond.lab.arrivals import with_random_prompts
    from millpond.lab.batchbench import BatchBench
    from millpond.lab.stepping import CHECKSUM_TOKENS, NO_LIMIT, ChecksumRunner

    if model is not None:
        engine = loading.open_engine(model, config, settings)
        requests = with_random_prompts(workload, engine.limits.vocab_size, seed)
        # Threads that wait for one another burn processor time; one alone does not.
        clock = time.process_time if engine.config.threads == 1 else time.perf_counter
        return BatchBench(engine.scheduler, engine.runner, clock, requests)
    assert config.num_blocks is not None
    scheduler = Scheduler(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=NO_LIMIT,
    )
    runner = ChecksumRunner()
    return BatchBench(scheduler, runner, runner.clock, with_random_prompts(workload, CHECKSUM_TOKENS, seed))


def measure(bench: BatchBench, rounds: int, warm_up: bool) -> tuple[BatchRun, BatchRun]:
    """Both policies under a progress bar on standard error."""
    from millpond.cli.progress import counting_bar

    with counting_bar(2 * (rounds + warm_up)) as notify:
        return bench.compare(rounds, warm_up=warm_up, notify=notify)


def config_of(
    slots: int, blocks: int | None, longest: int, block_size: int, max_num_batched_tokens: int, **rest: Any
) -> EngineConfig:
    """An engine of these sizes; a pool of no size of its own holds every slot at the longest a request can be."""
    if slots > max_num_batched_tokens:
        raise ConfigError(
            f"{slots} slots (--slots) are more than the {max_num_batched_tokens} tokens of a step "
            f"(--max-num-batched-tokens): some of the requests could never run together"
        )
    config = EngineConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        watermark_blocks=0,
        prefix_cache=False,  # both policies run the same requests
        **rest,
    )
    num_blocks = blocks or slots * blocks_for_length(longest, block_size)
    if num_blocks > MOST_BLOCKS:
        raise ConfigError(
            f"{slots} slots (--slots) of up to {longest} tokens (--prompt-tokens, --max-tokens) take {num_blocks} "
            f"blocks, more than {MOST_BLOCKS}: say how many there are (--blocks)"
        )
    return replace(config, num_blocks=num_blocks)


def batching(
    context: typer.Context,
    model: Model = None,
    requests: traffic.Requests = 24,
    prompt_tokens: traffic.PromptTokens = PROMPT_TOKENS,
    max_tokens: traffic.MaxTokens = MAX_TOKENS,
    seed: traffic.Seed = 0,
    slots: Slots = 8,
    blocks: Blocks = None,
    block_size: BlockSize = DEFAULTS.block_size,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count, where a model is timed.")] = 3,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object, with every request of both sides.")
    ] = False,
    plot: Plot = None,
) -> None:
    from millpond.lab.batchbench import report_of

    workload = traffic.drawn_workload(requests, prompt_tokens, max_tokens, seed)
    longest = prompt_tokens.longest + max_tokens.longest
    config = config_of(slots, blocks, longest, block_size, max_num_batched_tokens, threads=threads, isa=isa)
    bench = bench_of(model, config, workload, seed, context.ensure_object(Settings))
    timed, unit = (False, "step") if model is None else (True, "second")
    static, continuous = measure(bench, rounds if timed else 1, timed)
    report = report_of(bench, static, continuous, unit)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        from rich.console import Console

        Console().print(as_table(report["static"], report["continuous"], unit))
    if plot is not None:
        from millpond.lab.batching_plot import draw_timeline

        title = f"{model or 'no model'}: {requests} request{'s' * (requests > 1)}, {slots} slot{'s' * (slots > 1)}"
        draw_timeline(static, continuous, unit, title, plot)
