"""Progress bars on standard error: shown to a person, silent where it is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from millpond.load.progress import Progress as DownloadProgress


def _bar(*columns: ProgressColumn, console: Console) -> Progress:
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def counting_bar(total: int, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A bar over `total` pieces of work; call the function that it gives with the name of each piece as it starts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _bar(*columns, console=console or Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        num_started = 0

        def start(name: str) -> None:
            nonlocal num_started
            bar.update(task, description=name, completed=num_started)
            num_started += 1

        yield start


@contextmanager
def advancing_bar(total: int, what: str, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """A bar over `total` small pieces of work; call the function that it gives with how many are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _bar(*columns, console=console or Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num_done: bar.update(task, completed=num_done)


@contextmanager
def download_bar(console: Console | None = None) -> Iterator[DownloadProgress]:
    """A bar over bytes, for load/'s Progress. It appears with the first report; each new part of the work is a line."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with _bar(*columns, console=console) as bar:
        task = bar.add_task("", total=None, visible=False)
        part = ""

        def report(done_bytes: int, total_bytes: int | None, what: str) -> None:
            nonlocal part
            if what != part:
                part = what
                bar.reset(task, total=total_bytes, description=what, visible=True)
                if not console.is_terminal:
                    console.print(what, highlight=False, soft_wrap=True)
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield report
