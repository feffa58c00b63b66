"""From the name of a model to its file and to an engine, with what a person sees meanwhile (on standard error)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from platformdirs import user_cache_path

from millpond import compiler_process
from millpond.cli.settings import Settings
from millpond.compiler_process import Compiler
from millpond.config import EngineConfig
from millpond.source_hash import kernels_below

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


def compiler_for_first_start(settings: Settings) -> AbstractContextManager[Compiler | None]:
    """What compiles for a first start, begun before anything that this process would have to import for it."""
    folder = settings.kernels_folder or kernels_below(settings.cache_folder or user_cache_path("millpond"))
    return compiler_process.compiler_for_first_start(folder)


def open_engine(
    model: str,
    config: EngineConfig,
    settings: Settings,
    chat_template: str | None = None,
    compiler: Compiler | None = None,
) -> Engine:
    """An engine that is ready to serve the model. chat_template and compiler are as for `build_engine`."""
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
            compiler=compiler,
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
