"""`millpond doctor`: what this machine is, and what millpond will do with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    BlockSize,
    Dtype,
    Isa,
    KVDtype,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelArgument,
    Threads,
    Watermark,
    WatermarkBlocks,
    examples,
)
from millpond.cli.settings import Settings
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from millpond.cli.facts import Fact

HELP = """Say what this machine is, and what millpond will do with it.

Nothing is fetched, served or compiled. The flags are those of `millpond serve`: give the same ones to see what they
will do."""

EXAMPLES = examples(
    "millpond doctor",
    "millpond doctor ./model.gguf --kv-memory 2G",
    "millpond doctor smollm2 --json",
)


def register(app: typer.Typer) -> None:
    app.command("doctor", help=HELP, epilog=EXAMPLES)(doctor)


def as_json(report: Mapping[str, Sequence[Fact]]) -> str:
    values = {section: {each.name: each.value for each in facts} for section, facts in report.items()}
    return json.dumps(values, indent=2, ensure_ascii=False)


def label(name: str) -> str:
    """A name for a person; the unit of an amount of memory stands with the amount."""
    return name.removesuffix("_bytes").replace("_", " ")


def as_text(report: Mapping[str, Sequence[Fact]]) -> str:
    """A heading for each section, and its facts in two columns."""
    width = max(len(each.name) for facts in report.values() for each in facts) + 2
    lines = []
    for section, facts in report.items():
        lines += ["", label(section)]
        lines += [f"  {label(each.name):<{width}}{each.text}" for each in facts]
    return "\n".join(lines[1:])


def doctor(
    context: typer.Context,
    model: ModelArgument = DEFAULT_MODEL,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    block_size: BlockSize = DEFAULTS.block_size,
    watermark: Watermark = DEFAULTS.watermark,
    watermark_blocks: WatermarkBlocks = None,
    kv_memory: KVMemory = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    to_json: Annotated[bool, typer.Option("--json", help="Print one object, with numbers as numbers.")] = False,
) -> None:
    config = EngineConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        watermark=watermark,
        watermark_blocks=watermark_blocks,
        kv_memory=kv_memory,
        threads=threads,
        isa=isa,
    )
    from millpond.cli.facts import gather

    report = gather(model, config, context.ensure_object(Settings))
    typer.echo(as_json(report) if to_json else as_text(report))
