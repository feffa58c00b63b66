"""`millpond serve`: the OpenAI-compatible server."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli import loading
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
    PrefixCache,
    Speculative,
    SpeculativeTokens,
    Threads,
    Watermark,
    WatermarkBlocks,
    examples,
    parse_port,
)
from millpond.cli.settings import LOG_LEVELS, Settings
from millpond.config import EngineConfig
from millpond.errors import ConfigError

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

# What is wrong with a port that is taken, or that only the administrator may take.
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)

HELP = "Serve a model over HTTP with the OpenAI API; on this machine alone unless --host says more."

EXAMPLES = examples(
    "millpond serve",
    "millpond serve smollm2 --port 9000",
    "millpond serve ./model.gguf --kv-memory 2G --max-num-seqs 32",
    "millpond serve smollm2 --watermark-blocks 8 --audit",
    "millpond serve smollm2 --speculative ngram",
    "millpond serve smollm2 --kv-dtype int8",
)

Port = Annotated[
    int, typer.Option("--port", parser=parse_port, metavar="PORT", help="Port to listen on; 0 takes a free one.")
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="|".join(LOG_LEVELS), help="[default: MILLPOND_LOG_LEVEL, or info]"),
]
ServedModelName = Annotated[
    str | None, typer.Option("--served-model-name", help="Name that clients use [default: MODEL as given]")
]


def register(app: typer.Typer) -> None:
    app.command("serve", help=HELP, epilog=EXAMPLES)(serve)


def serve(
    context: typer.Context,
    model: ModelArgument = DEFAULT_MODEL,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8000,
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
    prefix_cache: PrefixCache = DEFAULTS.prefix_cache,
    speculative: Speculative = DEFAULTS.speculative,
    speculative_tokens: SpeculativeTokens = DEFAULTS.speculative_tokens,
    audit: Annotated[bool, typer.Option("--audit", help="Check every invariant after every step (slow).")] = False,
    served_model_name: ServedModelName = None,
    seed: Annotated[int, typer.Option("--seed", help="Key of the seeds of requests that bring none.")] = DEFAULTS.seed,
    log_level: LogLevel = None,
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
        prefix_cache=prefix_cache,
        speculative=speculative,
        speculative_tokens=speculative_tokens,
        audit=audit,
        seed=seed,
    )
    settings = context.ensure_object(Settings)
    level = log_level_of(log_level, settings)
    from millpond.serve.run import check_address

    with explaining(host, port):
        check_address(host, port)
    engine = loading.open_engine(model, config, settings)
    listen(engine, host, port, served_model_name or model, level)


def log_level_of(given: str | None, settings: Settings) -> str:
    """The flag where it is given, the environment's otherwise."""
    if given is not None and given not in LOG_LEVELS:
        raise typer.BadParameter(f"{given!r} is not one of {', '.join(LOG_LEVELS)}", param_hint="'--log-level'")
    return given or settings.log_level


def listen(engine: Engine, host: str, port: int, name: str, log_level: str) -> None:
    """Serve until a signal stops it. Raises ConfigError, with the way out, for an address that cannot be had."""
    from millpond.serve.run import serve as serve_http

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s")
    with explaining(host, port):
        serve_http(engine, host, port, model_names=(name,), notify=loading.notify, log_level=log_level)


@contextmanager
def explaining(host: str, port: int) -> Iterator[None]:
    """An address that cannot be had, as a ConfigError with the way out."""
    try:
        yield
    except OSError as error:
        flag = "--port" if error.errno in PORT_ERRORS else "--host"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror} (choose another with {flag})") from error
