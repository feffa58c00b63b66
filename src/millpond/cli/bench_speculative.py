"""`millpond bench speculative`: what guessing ahead gains on texts that repeat themselves, and costs on others."""

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
    KVDtype,
    KVMemory,
    ModelOption,
    Quantize,
    SpeculativeTokens,
    Threads,
    examples,
    parse_counts,
)
from millpond.cli.settings import Settings
from millpond.cli.streaming import chat_prompt
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.engine.engine import Engine
    from millpond.lab.bench_speculative import SpeculativePlan, SpeculativeRow

HELP = """Measure speculative decoding: the same questions with guesses and without them, in turns.

The repetitive questions ask for a text, a class or a table again; the ordinary ones are open. Speeds are output tokens
per second of whole answers, median of the rounds after one that is not counted; tokens/step is what a step gives one
request, right is how many guesses were. An answer that guessing changes ends the measurement.

With --threads 1 the seconds are those of the processor, which other work on the machine does not stretch."""

EXAMPLES = examples(
    "millpond bench speculative",
    "millpond bench speculative --sequences 1,4,16 --temperature 0.7",
    "millpond bench speculative --speculative-tokens 4 --json",
)


def register(group: typer.Typer) -> None:
    group.command("speculative", help=HELP, epilog=EXAMPLES)(speculative)


def as_table(rows: list[SpeculativeRow]) -> Table:
    """The rows for a person."""
    from rich.table import Table

    table = Table("questions", "at once", "off tok/s", "on tok/s", "gain", "tokens/step", "right")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in rows:
        table.add_row(
            row.workload,
            str(row.num_sequences),
            f"{row.plain_tok_s:.0f}",
            f"{row.guessed_tok_s:.0f}",
            f"{row.gain:.2f}x",
            f"{row.tokens_per_step:.2f}",
            f"{row.accepted}/{row.drafted}",
        )
    return table


def measure(engine: Engine, plan: SpeculativePlan) -> list[SpeculativeRow]:
    """Carry out the plan under a progress bar on standard error."""
    from millpond.cli.progress import counting_bar
    from millpond.lab.bench_speculative import SpeculativeBench
    from millpond.lab.speculative_prompts import PROMPTS

    prompts = {
        name: [chat_prompt(engine, [{"role": "user", "content": text}]) for text in texts]
        for name, texts in PROMPTS.items()
    }
    # Threads that wait for one another burn processor time; one alone does not.
    clock = time.process_time if engine.config.threads == 1 else time.perf_counter
    with counting_bar(len(prompts) * len(plan.sequences)) as notify:
        return SpeculativeBench(engine, prompts, clock).run(plan, notify)


def speculative(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    sequences: Annotated[str, typer.Option("--sequences", metavar="N,N", help="Numbers of requests at once.")] = "1,4",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that count.")] = 3,
    speculative_tokens: SpeculativeTokens = DEFAULTS.speculative_tokens,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    kv_memory: KVMemory = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with an object for each row.")] = False,
) -> None:
    from millpond.lab.bench_speculative import SpeculativePlan

    plan = SpeculativePlan(
        sequences=parse_counts(sequences, "--sequences"), max_tokens=max_tokens, temperature=temperature, rounds=rounds
    )
    config = EngineConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantize=quantize,
        max_num_seqs=max(DEFAULTS.max_num_seqs, *plan.sequences, 1),
        kv_memory=kv_memory,
        threads=threads,
        isa=isa,
        prefix_cache=False,  # the same questions come again and again
        speculative="ngram",
        speculative_tokens=speculative_tokens,
    )
    rows = measure(loading.open_engine(model, config, context.ensure_object(Settings)), plan)
    if as_json:
        typer.echo(json.dumps([row.as_json() for row in rows]))
        return
    from rich.console import Console

    Console().print(as_table(rows))
