"""`millpond eval kl`: how far a model's distributions are from a reference's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli.eval_perplexity import (
    WINDOWS,
    Context,
    MaxModelLen,
    Side,
    Windows,
    as_line,
    chosen_context,
    read_text,
    run,
    save,
)
from millpond.cli.options import DEFAULT_MODEL, DEFAULTS, Dtype, Isa, KVDtype, ModelOption, Quantize, Threads, examples
from millpond.cli.settings import Settings
from millpond.cli.traffic import is_given
from millpond.config import DTYPES, KV_DTYPES
from millpond.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.engine.engine import Engine
    from millpond.runner.divergence import Divergence
    from millpond.runner.logits_file import LogitsFile

HELP = f"""Measure how far a model's distributions are from a reference's: KL(reference || model), in nats.

The reference is the same model computed in float32, unless --reference-model, --reference-dtype or
--reference-kv-dtype say otherwise; or it is a file (--reference) that `millpond eval perplexity --save-logits` or
llama.cpp's perplexity tool has written, which holds the tokens of the text as well.

{WINDOWS}"""

EXAMPLES = examples(
    "millpond eval kl book.txt --model smollm2",
    "millpond eval kl book.txt --kv-dtype int8 --reference-dtype auto",
    "millpond eval kl book.txt --model folder --quantize q8",
    "millpond eval kl book.txt --model model-Q4_0.gguf --reference-model model-F16.gguf",
    "millpond eval kl --model smollm2 --reference reference.kld --json",
)
# What describes a reference that is computed, by parameter.
BESIDE_MODEL = {
    "reference_model": "--reference-model",
    "reference_dtype": "--reference-dtype",
    "reference_kv_dtype": "--reference-kv-dtype",
    "given_context": "--context",
}
PERCENTILES = (50, 90, 99, 99.9)


def register(group: typer.Typer) -> None:
    group.command("kl", help=HELP, epilog=EXAMPLES)(kl)


def kl(
    context: typer.Context,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="A file, or - for standard input; not with --reference.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    reference: Annotated[
        Path | None, typer.Option("--reference", metavar="FILE", help="Saved log probabilities.")
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option("--reference-model", metavar="MODEL", help="[default: the model itself]")
    ] = None,
    reference_dtype: Annotated[
        str, typer.Option("--reference-dtype", metavar="|".join(DTYPES), help="How the reference is computed.")
    ] = "float32",
    reference_kv_dtype: Annotated[
        str, typer.Option("--reference-kv-dtype", metavar="|".join(KV_DTYPES), help="The reference's keys and values.")
    ] = DEFAULTS.kv_dtype,
    given_context: Context = None,
    num_windows: Windows = None,
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object with the figures.")] = False,
) -> None:
    settings, common = context.ensure_object(Settings), (threads, isa, max_model_len)
    side = Side(model, dtype, kv_dtype, quantize, *common)
    if reference is not None:
        check_beside_file(context)
        if text is not None:
            raise ConfigError("--reference holds the text as well; give no other")
        measured = against_file(side, reference, num_windows, settings)
    else:
        if text is None:
            raise ConfigError("give a TEXT, or a --reference that holds one")
        base = Side(reference_model or model, reference_dtype, reference_kv_dtype, DEFAULTS.quantize, *common)
        measured = against_model(side, base, text, given_context, num_windows, settings)
    typer.echo(as_line(measured)) if as_json else show(measured)


def check_beside_file(context: typer.Context) -> None:
    """Raise BadParameter for an option that describes another reference than a file."""
    for name, option in BESIDE_MODEL.items():
        if is_given(context, name):
            message = "it is not used with --reference, whose file says it: leave out one of the two"
            raise typer.BadParameter(message, param_hint=f"'{option}'")


def against_model(
    side: Side, base: Side, text: str, context: int | None, num_windows: int | None, settings: Settings
) -> dict[str, Any]:
    """The reference runs first; what it says is kept in a temporary file."""
    from millpond.lab.evaluation import WindowPlan, text_tokens
    from millpond.runner.logits_file import open_logits_file

    if base == side:
        raise ConfigError("the model and its reference are the same; say what to compare (--kv-dtype int8, say)")
    written = read_text(text)
    plan = WindowPlan(context=chosen_context(context, [side, base], settings), num_windows=num_windows)
    with TemporaryDirectory(prefix="millpond-eval-") as folder:
        saved = Path(folder) / "reference.kld"
        with base.engine(plan.context, settings) as engine:
            token_ids = text_tokens(engine.tokenizer, written)
            save(engine, plan.cut(token_ids), plan.counted, saved)
        file = open_logits_file(saved)
        with side.engine(plan.context, settings) as engine:
            check_same(text_tokens(engine.tokenizer, written), token_ids, base.model)
            measured = compare(engine, file, file.windows)
    return {**measured, **side.as_json(), "reference": base.as_json()}


def against_file(side: Side, path: Path, num_windows: int | None, settings: Settings) -> dict[str, Any]:
    from millpond.runner.logits_file import open_logits_file

    try:
        file = open_logits_file(path)
    except OSError as error:
        raise ConfigError(f"--reference cannot be read: {path}: {error.strerror}") from None
    check_rows(file, num_windows)
    with side.engine(file.context, settings) as engine:
        measured = compare(engine, file, file.windows[:num_windows])
    return {**measured, **side.as_json(), "reference": {"file": path.name}}


def check_rows(file: LogitsFile, num_windows: int | None) -> None:
    """Look at what will be compared with before a model is loaded, under a progress bar."""
    from millpond.cli.progress import advancing_bar

    count = len(file.rows[:num_windows])
    with advancing_bar(count, "checking the reference") as advance:
        for window in range(count):
            file.check(window)
            advance(window + 1)


def check_same(token_ids: Sequence[int], reference: Sequence[int], name: str) -> None:
    """Raise ConfigError where two tokenizers see a text differently."""
    for place, (ours, theirs) in enumerate(zip_longest(token_ids, reference)):
        if ours != theirs:
            raise ConfigError(
                f"the model and {name} do not cut this text into the same tokens, so they cannot be compared: "
                f"at place {place} of {len(token_ids)} and {len(reference)} are tokens {ours} and {theirs}"
            )


def compare(engine: Engine, file: LogitsFile, windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The figures over the first of a file's windows."""
    from millpond.lab.evaluation import WindowPlan
    from millpond.runner.divergence import Divergence

    if file.vocab != engine.limits.vocab_size:
        raise ConfigError(
            f"the reference has a vocabulary of {file.vocab} tokens and the model one of {engine.limits.vocab_size}: "
            "they cannot be compared"
        )
    engine.limits.check_ids([token_id for window in windows for token_id in window], "the reference")
    divergence, started = Divergence(file), time.perf_counter()
    run(engine, windows, WindowPlan(context=file.context).counted, "comparing", divergence)
    seconds = time.perf_counter() - started
    about = {"windows": len(windows), "context": file.context, "seconds": round(seconds, 3)}
    return {**figures(divergence, len(windows)), **about}


def figures(divergence: Divergence, num_windows: int) -> dict[str, Any]:
    """Means with their standard errors over the first windows."""
    import numpy as np

    from millpond.lab.evaluation import Estimate, Perplexity

    kls = divergence.kl[:num_windows].reshape(-1)
    logprobs, base = (each[:num_windows].reshape(-1) for each in (divergence.logprobs, divergence.reference_logprobs))
    same = divergence.same_top[:num_windows].reshape(-1).astype(float)
    # The two surprises of a token go together, so the error of their difference is less than that of either.
    ratio = Perplexity.of((logprobs - base).tolist())
    mean, top = Estimate.of(kls.tolist()), Estimate.of(same.tolist())
    points = dict(zip(PERCENTILES, np.percentile(kls, PERCENTILES).tolist(), strict=True))
    return {
        "tokens": kls.size,
        "kl": {**asdict(mean), **{f"p{each:g}": value for each, value in points.items()}, "max": float(kls.max())},
        "same_top": asdict(top),
        "perplexity": asdict(Perplexity.of(logprobs.tolist())),
        "reference_perplexity": asdict(Perplexity.of(base.tolist())),
        "perplexity_ratio": asdict(ratio),
    }


def show(measured: dict[str, Any]) -> None:
    from rich.console import Console

    Console().print(as_table(measured))
    speed = measured["windows"] * measured["context"] / measured["seconds"]
    typer.echo(
        f"over {measured['tokens']:,} tokens: {measured['windows']} windows of {measured['context']}, their second "
        f"halves; {measured['seconds']:.1f} s, {speed:,.0f} tokens/s",
        err=True,
    )


def as_table(measured: dict[str, Any]) -> Table:
    """The figures for a person."""
    from rich.table import Table

    table = Table("figure", "value", "±")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    divergences, top = measured["kl"], measured["same_top"]
    table.add_row("KL, mean", f"{divergences['mean']:.6f}", f"{divergences['error']:.6f}")
    for name in (*(f"p{each:g}" for each in PERCENTILES), "max"):
        table.add_row(f"KL, {name}", f"{divergences[name]:.6f}")
    table.add_row("same likeliest token", f"{top['mean']:.3%}", f"{top['error']:.3%}")
    for name in ("perplexity", "reference_perplexity"):
        each = measured[name]
        table.add_row(name.replace("_", " "), f"{each['perplexity']:.4f}", f"{each['error']:.4f}")
    ratio = measured["perplexity_ratio"]
    table.add_row("their ratio", f"{ratio['perplexity']:.5f}", f"{ratio['error']:.5f}")
    return table
