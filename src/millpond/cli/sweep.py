"""`millpond sweep`: what a knob does, measured on the real scheduler with no model."""

from __future__ import annotations

import typer

from millpond.cli import sweep_config


def register(app: typer.Typer) -> None:
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(sweep)
    sweep_config.register(group)
    app.add_typer(group, name="sweep")


def sweep(context: typer.Context) -> None:
    """Find out what a setting does, with no model."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
