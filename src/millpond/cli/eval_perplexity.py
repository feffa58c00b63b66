"""`millpond eval perplexity`: how well a model predicts a text."""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import typer

from millpond.cli import loading
from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    Dtype,
    Isa,
    KVDtype,
    ModelOption,
    Quantize,
    Threads,
    check_target,
    examples,
    format_memory,
)
from millpond.cli.settings import Settings
from millpond.config import EngineConfig
from millpond.core.block_pool import blocks_for_length
from millpond.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from millpond.engine.engine import Engine
    from millpond.lab.evaluation import Perplexity, WindowPlan
    from millpond.runner.model_runner import ModelRunner

WINDOWS = """The text is cut into windows of --context tokens, each a request of its own; of a window the second half
counts, so that every token has at least half a window before it. This is how llama.cpp's perplexity tool does it, and
the figures compare with its own."""

HELP = f"""Measure the perplexity of a text: exp of the mean negative log probability of its tokens.

{WINDOWS} With --stride S, a window begins every S tokens and its last S count.

TEXT is a file in UTF-8, - is standard input; a newline at its end is left out."""

EXAMPLES = examples(
    "millpond eval perplexity book.txt --model smollm2",
    "millpond eval perplexity book.txt --model model.gguf --context 2048 --kv-dtype int8 --json",
    "millpond eval perplexity book.txt --dtype float32 --save-logits reference.kld",
)

# Windows that are in the engine at once fill so many steps.
STEPS_AHEAD = 2

DEFAULT_CONTEXT = 512

Context = Annotated[
    int | None, typer.Option("--context", metavar="N", help="Tokens of a window [default: 512, or what fits the model]")
]
Windows = Annotated[
    int | None, typer.Option("--windows", metavar="N", min=1, help="Most windows to look at [default: all]")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", help="As in `serve`, where a rotation depends on it [default: the model's]"),
]


class Sink(Protocol):
    """What takes the logits [rows, vocab] of a window's positions from `position` on."""

    def put(self, window: int, position: int, logits: NDArray[Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Side:
    """A model and how it is computed."""

    model: str
    dtype: str = DEFAULTS.dtype
    kv_dtype: str = DEFAULTS.kv_dtype
    quantize: str = DEFAULTS.quantize
    threads: int | None = None
    isa: str = DEFAULTS.isa
    max_model_len: int | None = None

    @contextmanager
    def engine(self, context: int, settings: Settings) -> Iterator[Engine]:
        """An engine with room for windows of `context` tokens, whose memory is given back afterwards."""
        from millpond.lab.evaluation import check_room

        check_room(context, self.length(settings))
        slots = STEPS_AHEAD * -(-DEFAULTS.max_num_batched_tokens // context) + 1
        config = EngineConfig(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            quantize=self.quantize,
            threads=self.threads,
            isa=self.isa,
            max_model_len=self.max_model_len,
            max_num_seqs=slots,
            num_blocks=slots * blocks_for_length(context, DEFAULTS.block_size),
            watermark_blocks=0,
            prefix_cache=False,
        )
        yield loading.open_engine(self.model, config, settings)
        # What setting up has frozen would stay.
        gc.unfreeze()
        gc.collect()

    def length(self, settings: Settings) -> int:
        """The most tokens that a text of the model's can have, read before anything is packed."""
        from millpond.model.checkpoint import open_checkpoint

        _, figures = open_checkpoint(loading.fetch_model(self.model, settings))
        most: int = figures.context_length
        return most if self.max_model_len is None else min(self.max_model_len, most)

    def as_json(self) -> dict[str, str]:
        return {"model": self.model, "dtype": self.dtype, "kv_dtype": self.kv_dtype, "quantize": self.quantize}


def register(group: typer.Typer) -> None:
    group.command("perplexity", help=HELP, epilog=EXAMPLES)(perplexity)


def read_text(name: str) -> str:
    """The text of a file, or of standard input for -, less its last newline."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = content.decode().removesuffix("\n")
    except OSError as error:
        raise InvalidRequestError(f"TEXT cannot be read: {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not a text in UTF-8: byte {error.start} is {error.reason}") from None
    if not text:
        raise InvalidRequestError(f"TEXT is empty: {name} holds nothing to measure")
    return text


def chosen_context(given: int | None, sides: Sequence[Side], settings: Settings) -> int:
    """The tokens of a window: those given, or the usual ones if the models are not too short for them."""
    if given is not None:
        return given
    context = min(DEFAULT_CONTEXT, *[side.length(settings) - 1 for side in sides])
    if context < DEFAULT_CONTEXT:
        loading.notify(f"windows of {context} tokens, not {DEFAULT_CONTEXT}: the model takes {context + 1} at most")
    return context


def run(
    engine: Engine, windows: Sequence[Sequence[int]], counted: range, what: str, sink: Sink | None = None
) -> list[float]:
    """The log probabilities of the tokens that count, window by window, under a progress bar."""
    from millpond.cli.progress import advancing_bar
    from millpond.lab.evaluation import score_windows

    runner = cast("ModelRunner", engine.runner)
    if sink is not None:
        runner.watch_prompts(lambda request_id, position, logits: sink.put(int(request_id), position, logits))
    with advancing_bar(len(windows), what) as advance:
        found = score_windows(engine, windows, counted, advance)
    return [logprob for each in found for logprob in each]


def perplexity(
    context: typer.Context,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A file, or - for standard input.")],
    model: ModelOption = DEFAULT_MODEL,
    given_context: Context = None,
    stride: Annotated[
        int | None, typer.Option("--stride", metavar="S", help="From one window to the next [default: --context]")
    ] = None,
    num_windows: Windows = None,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: KVDtype = DEFAULTS.kv_dtype,
    quantize: Quantize = DEFAULTS.quantize,
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    save_logits: Annotated[
        Path | None,
        typer.Option(
            "--save-logits",
            metavar="FILE",
            callback=check_target,
            help="Keep the log probabilities of all tokens, for `eval kl --reference` and for llama.cpp.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object with the figures.")] = False,
) -> None:
    from millpond.lab.evaluation import Perplexity, WindowPlan, text_tokens

    if save_logits is not None and stride is not None:
        raise ConfigError("a file of log probabilities holds windows side by side; leave out --stride or --save-logits")
    settings, written = context.ensure_object(Settings), read_text(text)
    side = Side(model, dtype, kv_dtype, quantize, threads, isa, max_model_len)
    window_tokens = chosen_context(given_context, [side], settings)
    plan = WindowPlan(context=window_tokens, stride=stride, num_windows=num_windows)
    with side.engine(window_tokens, settings) as engine:
        windows = plan.cut(text_tokens(engine.tokenizer, written))
        started = time.perf_counter()
        arguments = engine, windows, plan.counted
        logprobs = run(*arguments, "scoring") if save_logits is None else save(*arguments, save_logits)
        seconds = time.perf_counter() - started
    figures = Perplexity.of(logprobs)
    if as_json:
        about = {"windows": len(windows), "context": window_tokens, "stride": stride, "seconds": round(seconds, 3)}
        typer.echo(as_line({**asdict(figures), **side.as_json(), **about}))
    else:
        show(figures, plan, len(windows), seconds)


def show(figures: Perplexity, plan: WindowPlan, num_windows: int, seconds: float) -> None:
    counted = "their second halves" if plan.stride is None else f"their last {plan.stride} tokens"
    typer.echo(f"perplexity {figures.perplexity:.4f} ± {figures.error:.4f}")
    typer.echo(
        f"over {figures.num_tokens:,} tokens: {num_windows} windows of {plan.context}, {counted}; "
        f"{seconds:.1f} s, {num_windows * plan.context / seconds:,.0f} tokens/s",
        err=True,
    )


def as_line(measured: dict[str, Any]) -> str:
    """The figures as JSON, which has no number for what is infinite: null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(measured), allow_nan=False)


def save(engine: Engine, windows: Sequence[Sequence[int]], counted: range, path: Path) -> list[float]:
    """Score the windows and keep all log probabilities in a file, which is there whole or not at all."""
    from millpond.runner.logits_file import create_logits_file, file_bytes

    needed = file_bytes(len(windows[0]), engine.limits.vocab_size, len(windows))
    free = shutil.disk_usage(path.absolute().parent).free
    if needed > free:
        raise ConfigError(
            f"the log probabilities of {len(windows)} windows take {format_memory(needed)}, and {format_memory(free)} "
            "are free there; take fewer (--windows)"
        )
    part = path.with_name(f"{path.name}.part")
    try:
        file = create_logits_file(part, windows, engine.limits.vocab_size)
        logprobs = run(engine, windows, counted, "scoring the reference", file)
        file.flush()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return logprobs
