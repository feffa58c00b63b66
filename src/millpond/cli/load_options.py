"""The options of `serve` that bound what it takes on; their names and defaults are the fields of LoadLimits."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.config import LoadLimits

LOAD_DEFAULTS = LoadLimits()

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
