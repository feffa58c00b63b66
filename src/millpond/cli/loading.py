"""From the name of a model to its file and to an engine, with what a person sees meanwhile (on standard error)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from millpond.cli.settings import Settings
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from millpond.engine.engine import Engine


def notify(message: str) -> None:
    """One line of progress; standard output stays for what was asked for."""
    typer.echo(message, err=True)


def fetch_model(model: str, settings: Settings) -> Path:
    """The model's file on this machine, fetched with a progress bar if it is not there."""
    from millpond.cli.progress import download_bar
    from millpond.load.store import resolve

    with download_bar() as progress:
        return resolve(model, cache_dir=settings.cache_folder, progress=progress)


def open_engine(model: str, config: EngineConfig, settings: Settings, chat_template: str | None = None) -> Engine:
    """An engine that is ready to serve the model. chat_template is as for `build_engine`."""
    from millpond.cli.progress import download_bar

    if chat_template is not None:
        from millpond.text.given_template import read_template

        chat_template = read_template(chat_template)  # before anything is fetched
    path = fetch_model(model, settings)
    with setting_up(), download_bar() as progress:
        from millpond.build import build_engine

        return build_engine(
            str(path),
            config,
            notify=notify,
            cache_dir=settings.cache_folder,
            progress=progress,
            chat_template=chat_template,
        )


@contextmanager
def setting_up() -> Iterator[None]:
    """For work that makes many objects which stay for good. Looking for garbage among them takes a tenth of a start,
    and later would now and then hold up a step; nothing is looked for meanwhile, nor among them ever after."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
