"""`millpond serve`: the OpenAI-compatible server."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli import loading
from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    BlockSize,
    ChatTemplate,
    Dtype,
    Isa,
    ItlTarget,
    KVDtype,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelArgument,
    Policy,
    PrefixCache,
    PrefixDir,
    PrefixDirSize,
    Quantize,
    Speculative,
    SpeculativeTokens,
    TenantWeights,
    Threads,
    Watermark,
    WatermarkBlocks,
    examples,
    parse_port,
    parse_weights,
)
from millpond.cli.server_options import (
    LOAD_DEFAULTS,
    SERVER_DEFAULTS,
    ApiKey,
    ApiKeyFile,
    CorsOrigin,
    DrainTimeout,
    LogFormat,
    LogLevel,
    LogPrompts,
    MaxBodyBytes,
    MaxWaitingRequests,
    MaxWaitingTokens,
    OtlpEndpoint,
    QueueTimeout,
    RequestTimeout,
    SlowRequest,
    StuckAfter,
    TlsCert,
    TlsKey,
    api_keys,
)
from millpond.cli.settings import Settings
from millpond.config import EngineConfig, LoadLimits, ServerConfig
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
    "millpond serve ./folder --chat-template template.jinja",
    "millpond serve smollm2 --watermark-blocks 8 --audit",
    "millpond serve smollm2 --kv-memory 64M --watermark auto",
    "millpond serve smollm2 --speculative ngram",
    "millpond serve smollm2 --kv-dtype int8",
    "millpond serve smollm2 --policy fair --api-key-file keys.txt --tenant-weight key1=3",
    "millpond serve smollm2 --cache-dir ./prefixes --cache-dir-size 8G",
    "millpond serve smollm2 --host 0.0.0.0 --api-key-file keys.txt --tls-cert cert.pem --tls-key key.pem",
    "millpond serve smollm2 --log-format json --drain-timeout 60",
    "millpond serve smollm2 --itl-target 20 --max-waiting-requests 100 --queue-timeout 30",
)

Port = Annotated[
    int, typer.Option("--port", parser=parse_port, metavar="PORT", help="Port to listen on; 0 takes a free one.")
]
ServedModelName = Annotated[
    str | None,
    typer.Option("--served-model-name", help="Name that clients use [default: MODEL, of a path its file or folder]"),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse fields that nobody knows, instead of naming them in a header.")
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
    quantize: Quantize = DEFAULTS.quantize,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    itl_target: ItlTarget = None,
    block_size: BlockSize = DEFAULTS.block_size,
    watermark: Watermark = DEFAULTS.watermark,
    watermark_blocks: WatermarkBlocks = None,
    kv_memory: KVMemory = None,
    threads: Threads = None,
    isa: Isa = DEFAULTS.isa,
    prefix_cache: PrefixCache = DEFAULTS.prefix_cache,
    prefix_dir: PrefixDir = None,
    prefix_dir_size: PrefixDirSize = None,
    speculative: Speculative = DEFAULTS.speculative,
    speculative_tokens: SpeculativeTokens = DEFAULTS.speculative_tokens,
    policy: Policy = DEFAULTS.policy,
    tenant_weights: TenantWeights = None,
    audit: Annotated[bool, typer.Option("--audit", help="Check every invariant after every step (slow).")] = False,
    served_model_name: ServedModelName = None,
    chat_template: ChatTemplate = None,
    seed: Annotated[int, typer.Option("--seed", help="Key of the seeds of requests that bring none.")] = DEFAULTS.seed,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    cors_origin: CorsOrigin = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    max_body_bytes: MaxBodyBytes = SERVER_DEFAULTS.max_body_bytes,
    drain_timeout: DrainTimeout = SERVER_DEFAULTS.drain_timeout,
    max_waiting_requests: MaxWaitingRequests = LOAD_DEFAULTS.max_waiting_requests,
    max_waiting_tokens: MaxWaitingTokens = LOAD_DEFAULTS.max_waiting_tokens,
    request_timeout: RequestTimeout = None,
    queue_timeout: QueueTimeout = None,
    stuck_after: StuckAfter = LOAD_DEFAULTS.stuck_after,
    log_level: LogLevel = None,
    log_format: LogFormat = "text",
    log_prompts: LogPrompts = False,
    slow_request: SlowRequest = SERVER_DEFAULTS.slow_request,
    otlp_endpoint: OtlpEndpoint = None,
    strict: Strict = False,
) -> None:
    settings = context.ensure_object(Settings)
    _serve(_given(context.params, settings), settings)


def _serve(given: dict[str, Any], settings: Settings) -> None:
    config, load = EngineConfig(**_of(EngineConfig, given)), LoadLimits(**_of(LoadLimits, given))
    server_config = ServerConfig(**_of(ServerConfig, given))
    host, port, model = given["host"], given["port"], given["model"]
    with loading.compiler_for_first_start(settings) as compiler:
        from millpond.serve.tenants import check_tenants

        check_server(host, port, server_config)
        check_tenants([tenant for tenant, _ in config.tenant_weights], len(server_config.api_keys))
        engine = loading.open_engine(model, config, settings, given["chat_template"], compiler)
    if not engine.limits.generates:
        loading.notify("this model makes embeddings alone (/v1/embeddings), each of a whole prompt: nothing is cached")
    elif engine.chat_template.is_missing:
        loading.notify("this model has no chat template, so it only continues texts; --chat-template gives it one")
    # A path is nobody's name for a model: what is served is what the file or folder is called.
    name = given["served_model_name"] or (engine.model_name if Path(model).exists() else model)
    listen(engine, host, port, name, server_config, load, given["log_format"])


def _given(options: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The options, those that are fields of a config as it has them."""
    return {
        **options,
        "tenant_weights": parse_weights(options["tenant_weights"]),
        "api_keys": api_keys(options["api_key"] or (), options["api_key_file"], settings.api_keys),
        "cors_origins": tuple(options["cors_origin"] or ()),
        "log_level": options["log_level"] or settings.log_level,
    }


def _of(config: type, given: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of a config."""
    return {field.name: given[field.name] for field in fields(config) if field.name in given}


def check_server(host: str, port: int, config: ServerConfig) -> None:
    """Raise ConfigError for what the server could not start with: now, rather than after a model has been loaded."""
    from millpond.serve.run import check_address
    from millpond.serve.tls import check_certificate
    from millpond.serve.tracing import check_tracing

    with explaining(host, port):
        check_address(host, port)
    if config.tls_cert is not None:
        check_certificate(config.tls_cert, config.tls_key)
    if config.otlp_endpoint is not None:
        check_tracing()


def listen(
    engine: Engine, host: str, port: int, name: str, config: ServerConfig, load: LoadLimits, log_format: str
) -> None:
    """Serve until a signal stops it. Raises ConfigError, with the way out, for an address that cannot be had."""
    from millpond.serve.logs import configure_logging
    from millpond.serve.run import serve as serve_http

    configure_logging(config.log_level, log_format)
    with explaining(host, port):
        serve_http(engine, host, port, config, load=load, model_names=(name,), notify=loading.notify)


@contextmanager
def explaining(host: str, port: int) -> Iterator[None]:
    """An address that cannot be had, as a ConfigError with the way out."""
    try:
        yield
    except OSError as error:
        flag = "--port" if error.errno in PORT_ERRORS else "--host"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror} (choose another with {flag})") from error
