"""`millpond pull`: fetch a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millpond.cli import loading
from millpond.cli.options import examples
from millpond.cli.settings import Settings

HELP = """Fetch a model into the user's cache folder; one that is there already is left alone.

MODEL is a known name (smollm2, gemma3-270m, all-minilm-l6-v2) or a repository of the Hugging Face hub, with the
file's name where it holds several."""

EXAMPLES = examples(
    "millpond pull smollm2",
    "millpond pull gemma3-270m",
    "millpond pull all-minilm-l6-v2",
    "millpond pull org/repo",
    "millpond pull org/repo:model-Q8_0.gguf",
)


def register(app: typer.Typer) -> None:
    app.command("pull", help=HELP, epilog=EXAMPLES)(pull)


def pull(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known name, or org/repo[:file].")],
) -> None:
    path = loading.fetch_model(model, context.ensure_object(Settings))
    typer.echo(path)
    typer.echo(f"licence: {licence_of(model, path)}", err=True)


def licence_of(model: str, path: Path) -> str:
    """The model's licence: what is known of it, or what its file says."""
    from millpond.load.catalog import KNOWN_MODELS
    from millpond.load.gguf import open_gguf

    if model in KNOWN_MODELS:
        return f"{KNOWN_MODELS[model].licence} ({KNOWN_MODELS[model].title})"
    named = {} if path.is_dir() else open_gguf(path).metadata
    return str(named.get("general.license", "the file does not name one; see where it comes from"))
