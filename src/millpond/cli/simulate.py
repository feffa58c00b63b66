"""`millpond simulate`: a workload on the real scheduler and engine loop, in virtual time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli import loading, traffic
from millpond.cli.options import (
    DEFAULTS,
    Blocks,
    BlockSize,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Plot,
    Policy,
    TenantWeights,
    Watermark,
    WatermarkBlocks,
    examples,
    parse_weights,
)
from millpond.cli.settings import Settings
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from millpond.engine.engine import Engine
    from millpond.lab.cost_model import CostModel
    from millpond.lab.latency import Slo
    from millpond.lab.workload import WorkloadRequest

HELP = (
    """Run a workload on the real scheduler and engine loop, with no model and in virtual time.

Each step takes as long as a cost model says that is fitted to steps of a real engine: record your own with
`millpond bench engine --record steps.jsonl`. The same arguments give the same figures, to the digit.

With --against the same workload runs on a real model too, in real time, and the table has both.

"""
    + f"{traffic.LENGTHS_HELP} {traffic.TRACE_HELP}"
)

EXAMPLES = examples(
    "millpond simulate --requests 10000 --rate 6",
    "millpond simulate --cost steps.jsonl --rate 6 --burstiness 3 --ttft-slo 1 --itl-slo 0.1 --plot run.png",
    "millpond simulate --trace requests.jsonl --max-num-seqs 32 --blocks 512 --json",
    "millpond simulate --trace requests.jsonl --policy fair --tenant-weight a=2",
    "millpond simulate --cost steps.jsonl --requests 100 --rate 4 --against smollm2",
)

RANKS = ("p50", "p90", "p99")
LABELS = {"output_tok_s": "output tok/s", "requests_s": "requests/s", "ttft": "TTFT", "itl": "ITL", "e2e": "end to end"}


def register(app: typer.Typer) -> None:
    app.command("simulate", help=HELP, epilog=EXAMPLES)(simulate)


def run_simulated(
    workload: Sequence[WorkloadRequest], config: EngineConfig, cost: CostModel, slo: Slo
) -> dict[str, Any]:
    """The figures of a simulated run, under a progress bar on standard error, and how fast it was simulated."""
    from millpond.cli.progress import advancing_bar
    from millpond.lab.simulation_report import figures, pool_figures
    from millpond.lab.simulator import simulate

    with advancing_bar(len(workload), "requests") as notify:
        start = time.perf_counter()
        done = simulate(workload, config, cost, notify)
        seconds = time.perf_counter() - start
    return {
        "cost": cost.as_json(),
        "simulated": figures(done.latencies, done.counters, slo),
        "pool": pool_figures(done),
        "run_seconds": seconds,
        "run_requests_s": len(workload) / seconds,
    }


def run_real(engine: Engine, workload: Sequence[WorkloadRequest], slo: Slo, seed: int) -> dict[str, Any]:
    """The figures of the same workload on a real engine, with random prompts."""
    from millpond.cli.progress import advancing_bar
    from millpond.lab.arrivals import with_random_prompts
    from millpond.lab.driving import RealClock, drive
    from millpond.lab.simulation_report import figures

    workload = with_random_prompts(workload, engine.limits.vocab_size, seed)
    with advancing_bar(len(workload), f"requests on {engine.model_name}") as notify:
        latencies = drive(engine, workload, RealClock(), notify)
    return figures(latencies, engine.scheduler.counters, slo)


def open_real(model: str, config: EngineConfig, settings: Settings, workload: Sequence[WorkloadRequest]) -> Engine:
    """The engine of --against; what it could not serve is refused before anything is simulated."""
    from millpond.lab.workload import check_door

    engine = loading.open_engine(model, config, settings)
    check_door(workload, engine.scheduler.door)
    return engine


def texts(side: Mapping[str, Any]) -> dict[str, str]:
    """The figures of one run for a person, by name."""
    found = {
        "output_tok_s": f"{side['output_tok_s']:,.1f}",
        "requests_s": f"{side['requests_s']:,.2f}",
        "seconds": f"{side['seconds']:,.1f}",
        "steps": f"{side['steps']:,}",
    }
    for name in ("ttft", "itl", "e2e"):
        for rank in RANKS if side[f"{name}_s"] else ():
            found[f"{name}_{rank}"] = span(side[f"{name}_s"][rank])
    if side["goodput"] is not None:
        found["goodput"] = f"{side['goodput']['requests_s']:,.2f}/s, {side['goodput']['share']:.1%}"
    found["preemptions"] = f"{side['preemptions']:,}"
    found["recompute_share"] = f"{side['recompute_share']:.1%}"
    return found


def span(seconds: float) -> str:
    """A span of time for a person."""
    return f"{1e3 * seconds:,.1f} ms" if seconds < 10.0 else f"{seconds:,.1f} s"


def label(name: str) -> str:
    """The name of a figure for a person."""
    first, _, rank = name.partition("_")
    return LABELS.get(name) or (f"{LABELS[first]} {rank}" if first in LABELS else name.replace("_", " "))


def as_table(report: Mapping[str, Any]) -> Table:
    """A row for each figure; a column for the simulation and, where there was one, for the real run and the error."""
    from rich import box
    from rich.table import Table

    sides = {name: texts(report[name]) for name in ("simulated", "real") if report.get(name)}
    errors = report.get("errors")
    table = Table("", *sides, *(["error"] if errors else []), box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in sides["simulated"]:
        row = [each.get(name, "") for each in sides.values()]
        if errors:
            row.append(f"{errors[name]:+.1%}" if name in errors else "")
        table.add_row(label(name), *row)
    return table


def summary(report: Mapping[str, Any]) -> list[str]:
    """What stands under the table: the pool's use, the cost model, and how fast this was."""
    pool, cost = report["pool"], report["cost"]
    used, most = pool["mean_used_blocks"] / pool["num_blocks"], pool["most_used_blocks"] / pool["num_blocks"]
    fit = (
        f", fitted to {cost['num_steps']} steps less {cost['num_disturbed']} that were held up, "
        f"half of all within {cost['median_error']:.0%}"
    )
    return [
        f"pool: {pool['num_blocks']} blocks, {used:.0%} used on average, {most:.0%} at the most; at the most "
        f"{pool['most_running']} requests ran and {pool['most_waiting']} waited",
        f"cost of a step: {cost['source']}{fit if cost['num_steps'] else ''}",
        f"simulated in {report['run_seconds']:.1f} s: {report['run_requests_s']:,.0f} requests a second",
    ]


def simulate(
    context: typer.Context,
    requests: traffic.Requests = 10_000,
    rate: traffic.Rate = 5.0,
    burstiness: traffic.Burstiness = 1.0,
    prompt_tokens: traffic.PromptTokens = traffic.PROMPT_TOKENS,
    max_tokens: traffic.MaxTokens = traffic.MAX_TOKENS,
    seed: traffic.Seed = 0,
    trace: traffic.Trace = None,
    cost: traffic.Cost = None,
    ttft_slo: traffic.TtftSlo = None,
    itl_slo: traffic.ItlSlo = None,
    blocks: Blocks = 1024,
    block_size: BlockSize = DEFAULTS.block_size,
    max_num_seqs: MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", help="Longest prompt and output together, in tokens [default: what fits]"),
    ] = None,
    watermark: Watermark = DEFAULTS.watermark,
    watermark_blocks: WatermarkBlocks = None,
    policy: Policy = DEFAULTS.policy,
    tenant_weights: TenantWeights = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="MODEL", help="Run the workload on this model as well.")
    ] = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, with the pool over time.")] = False,
) -> None:
    workload = (
        traffic.drawn_workload(requests, prompt_tokens, max_tokens, seed, rate=rate, burstiness=burstiness)
        if trace is None
        else traffic.traced_workload(context, trace)
    )
    config = config_of(context.params)
    slo = traffic.slo_of(ttft_slo, itl_slo)
    model = traffic.cost_model(cost)
    engine = None if against is None else open_real(against, config, context.ensure_object(Settings), workload)
    report = run_simulated(workload, config, model, slo)
    if engine is not None:
        report |= compare(report["simulated"], run_real(engine, workload, slo, seed))
    show(report, as_json, plot)


def config_of(given: Mapping[str, Any]) -> EngineConfig:
    """What of the command's parameters is the engine's."""
    names = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "watermark", "watermark_blocks")
    sizes = {name: given[name] for name in names}
    weights = parse_weights(given["tenant_weights"])
    return EngineConfig(
        num_blocks=given["blocks"], policy=given["policy"], tenant_weights=weights, prefix_cache=False, **sizes
    )


def compare(simulated: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, Any]:
    """The real figures, and how far the simulated ones are from them."""
    from millpond.lab.simulation_report import relative_errors

    return {"real": real, "errors": relative_errors(simulated, real)}


def show(report: Mapping[str, Any], as_json: bool, plot: Path | None) -> None:
    if as_json:
        typer.echo(json.dumps(report))
    else:
        from rich.console import Console

        Console().print(as_table(report))
        for line in summary(report):
            typer.echo(line)
    if plot is not None:
        from millpond.lab.simulation_plot import draw

        draw(report, plot)
