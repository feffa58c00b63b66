"""Options of `millpond serve` that are not the engine's: fields of ServerConfig, then of LoadLimits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from millpond.cli.options import parse_memory
from millpond.config import LOG_FORMATS, LOG_LEVELS, LoadLimits, ServerConfig
from millpond.errors import ConfigError

SERVER_DEFAULTS = ServerConfig()
LOAD_DEFAULTS = LoadLimits()


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A parser that takes these words alone."""

    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def api_keys(given: Sequence[str], path: Path | None, environment: tuple[str, ...] | None) -> tuple[str, ...]:
    """Every key of the options and of the environment. Raises ConfigError for a file without one."""
    keys = [*given, *(environment or ())]
    if path is not None:
        keys += _keys_in(path)
    return tuple(dict.fromkeys(keys))


def _keys_in(path: Path) -> list[str]:
    """One on each line; empty lines and those that begin with # hold none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the API keys in {path} are not text: {error.reason}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"there is no API key in {path}: it would leave the server open to all")
    return keys


ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="A key that requests must bring; can be repeated. Others on this machine see it: a file or "
        "MILLPOND_API_KEYS (separated by commas) is better.",
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help="A file of such keys, one on each line.")
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin", metavar="ORIGIN", help="An origin whose pages may ask, or '*'; can be repeated [default: none]"
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="Serve HTTPS with this certificate chain (PEM).")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key, unless it is in that file.")]
MaxBodyBytes = Annotated[
    int,
    typer.Option("--max-body-bytes", parser=parse_memory, metavar="SIZE", help="Largest body of a request."),
]
DrainTimeout = Annotated[
    float,
    typer.Option("--drain-timeout", metavar="SECONDS", help="How long running answers may go on after a stop signal."),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        parser=one_of(LOG_LEVELS),
        metavar="|".join(LOG_LEVELS),
        help="[default: MILLPOND_LOG_LEVEL, or info]",
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        parser=one_of(LOG_FORMATS),
        metavar="|".join(LOG_FORMATS),
        help="Lines for people, or a JSON object on each line.",
    ),
]
LogPrompts = Annotated[
    bool, typer.Option("--log-prompts", help="Log the bodies of requests, which no log holds otherwise.")
]
SlowRequest = Annotated[
    float,
    typer.Option(
        "--slow-request",
        metavar="SECONDS",
        help="The log line of a request that takes so long says what it waited for; 0 for all.",
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        "--otlp-endpoint",
        metavar="URL",
        help="Send a trace of each request there (OTLP over HTTP; takes millpond[otel]).",
    ),
]
MaxWaitingRequests = Annotated[
    int,
    typer.Option("--max-waiting-requests", help="Requests that may wait for a slot; more get a 429 with Retry-After."),
]
MaxWaitingTokens = Annotated[
    int, typer.Option("--max-waiting-tokens", help="Tokens of prompts that may wait; more get the same.")
]
RequestTimeout = Annotated[
    float | None,
    typer.Option("--request-timeout", metavar="SECONDS", help="Longest that a request may take [default: no bound]"),
]
QueueTimeout = Annotated[
    float | None,
    typer.Option("--queue-timeout", metavar="SECONDS", help="Longest that it may wait to begin [default: no bound]"),
]
StuckAfter = Annotated[
    float,
    typer.Option("--stuck-after", metavar="SECONDS", help="A step that takes longer turns /health into a 503."),
]
