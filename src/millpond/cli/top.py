"""`millpond top`: what a running server is doing, request by request, in a terminal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli.bench_serve import ApiKey, Url, server_of
from millpond.cli.options import examples
from millpond.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from millpond.lab.http_client import Server

HELP = """Show what a running millpond server is doing: its pool and slots, tokens per second, and each request with how
far it is or what it waits for. Ctrl-C ends it.

With API keys the requests shown are those of the key; the numbers above them are the server's."""

EXAMPLES = examples(
    "millpond top",
    "millpond top --url http://127.0.0.1:9000 --interval 0.5",
    "millpond top --once --rows 20",
)

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_ROWS, MOST_ROWS = 100, 2000  # where no terminal says how many fit; what the server gives at most
OTHER_LINES = 10  # of a frame: what stands above the rows and below
ANSWER_SECONDS = 10.0
BAR_CELLS = 30
LEAST_CELLS = 14, 20


def register(app: typer.Typer) -> None:
    app.command("top", help=HELP, epilog=EXAMPLES)(top)


async def _get(server: Server, limit: int) -> tuple[int, bytes]:
    """Status and body of the server's list of requests."""
    from millpond.lab.http_client import exchange

    pieces: list[bytes] = []
    message = server.message("GET", f"/v1/requests?limit={limit}")
    answer = await exchange(server, message, lambda data, _: pieces.append(data))
    await answer.done
    if not answer.is_whole:
        raise OSError(answer.fault)
    return answer.status, b"".join(pieces) or answer.error_body


def picture_of(server: Server, url: str, limit: int) -> dict[str, Any]:
    """What the server says of its requests. Raises ConfigError where there is no such server, or it wants a key."""
    try:
        status, body = asyncio.run(asyncio.wait_for(_get(server, limit), ANSWER_SECONDS))
    except TimeoutError:
        raise ConfigError(f"the server at {url} has not answered in {ANSWER_SECONDS:g} s") from None
    except OSError as error:
        raise ConfigError(f"no server answers at {url}: {error.strerror or error}") from error
    if status == 401:
        raise ConfigError(f"the server at {url} wants an API key: give one that it knows with --api-key")
    try:
        picture = json.loads(body) if status == 200 else None
    except ValueError:
        picture = None
    if not isinstance(picture, dict) or "blocks" not in picture:
        raise ConfigError(f"what answers at {url} is no millpond server that lists its requests (status {status})")
    return picture


def rates(picture: Mapping[str, Any], before: Mapping[str, Any] | None) -> tuple[float, float]:
    """Tokens generated and positions forwarded in a second, since the picture before; else in the newest step."""
    if before is not None and (seconds := picture["clock"] - before["clock"]) > 0:
        generated, forward = (picture[name] - before[name] for name in ("generated_tokens", "forward_tokens"))
        return generated / seconds, forward / seconds
    last = picture["last_step"]
    if last is None or not picture["running"] or not last["seconds"]:
        return 0.0, 0.0
    return last["generated_tokens"] / last["seconds"], last["tokens"] / last["seconds"]


def frame(picture: Mapping[str, Any], before: Mapping[str, Any] | None, url: str) -> RenderableType:
    """One look at the server, for a terminal."""
    from rich.console import Group

    parts: list[RenderableType] = [*head_lines(picture, rates(picture, before), url)]
    if rows := picture["data"]:
        parts.append(as_table(rows))
    if (hidden := picture["unfinished"] - len(rows)) > 0:
        parts.append(_text(f"and {hidden} more"))
    return Group(*parts)


def head_lines(picture: Mapping[str, Any], speeds: tuple[float, float], url: str) -> list[Text]:
    """The server in five lines."""
    slots, blocks = picture["slots"], picture["blocks"]
    held = blocks["total"] - blocks["free"]
    cells = round(BAR_CELLS * held / blocks["total"])
    bar = "#" * cells + "." * (BAR_CELLS - cells)
    waiting = f"{picture['waiting']} wait"
    if picture["head_waits_for"]:
        waiting += f"; the next one: {picture['head_waits_for']}"
    lines = (
        f"{picture['model']} at {url}, step {picture['steps']}, {picture['preemptions']} preemptions so far",
        f"blocks  {bar} {held} of {blocks['total']} held, {blocks['held_back']} held back from newcomers",
        f"slots   {slots['total'] - slots['free']} of {slots['total']} taken",
        f"queue   {picture['running']} run, {waiting}",
        f"tokens  {speeds[0]:,.1f} generated and {speeds[1]:,.1f} forwarded in a second",
    )
    return [_text(line) for line in lines]


def as_table(rows: list[Mapping[str, Any]]) -> Table:
    """A row for each request: those that run, oldest first, then those that wait, line by line."""
    from rich import box
    from rich.table import Table

    table = Table(
        "request", "state", "age", "output", "blocks", "preempted", "", box=box.SIMPLE_HEAD, padding=0, pad_edge=False
    )
    for column in table.columns[2:6]:
        column.justify = "right"
    for column in table.columns[1:6]:  # where a terminal is narrow, ids and reasons give way, but not all of them
        column.no_wrap = True
    table.columns[0].min_width, table.columns[6].min_width = LEAST_CELLS
    for row in rows:
        most = row["max_tokens"]
        table.add_row(
            _text(row["id"]),
            row["state"],
            f"{row['seconds']:.1f} s",
            str(row["output_tokens"]) if most is None else f"{row['output_tokens']}/{most}",
            str(row["blocks"]),
            str(row["preemptions"]),
            _text(row["waiting_for"] or progress(row)),
        )
    return table


def progress(row: Mapping[str, Any]) -> str:
    """What a running request is at: its newest token alone, or the tokens before it."""
    tokens = row["prompt_tokens"] + row["output_tokens"]
    missing = tokens - row["computed_tokens"]
    return "decodes" if missing <= 1 else f"computed {row['computed_tokens']} of {tokens} tokens"


def _text(line: str) -> Text:
    """Without markup: a server may say anything."""
    from rich.text import Text

    return Text(line, overflow="ellipsis", no_wrap=True)


def watch(server: Server, url: str, rows: int | None, interval: float, console: Console) -> None:
    """Frame after frame until Ctrl-C; one below the other where there is no terminal."""
    from rich.live import Live

    before: dict[str, Any] | None = None
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            picture = picture_of(server, url, rows or _rows_that_fit(console))
            shown = frame(picture, before, url)
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
            before = picture
            time.sleep(interval)


def _rows_that_fit(console: Console) -> int:
    return min(MOST_ROWS, max(1, console.height - OTHER_LINES)) if console.is_terminal else DEFAULT_ROWS


def top(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, metavar="SECONDS", help="From one look to the next.")
    ] = 1.0,
    rows: Annotated[
        int | None,
        typer.Option("--rows", min=1, max=MOST_ROWS, help="Requests to show [default: what fits, 100 for a script]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once and end, for scripts.")] = False,
) -> None:
    from rich.console import Console

    server, console = server_of(context, url, api_key, ()), Console()
    if once:
        console.print(frame(picture_of(server, url, rows or DEFAULT_ROWS), None, url))
        return
    watch(server, url, rows, interval, console)
