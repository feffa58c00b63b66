"""`millpond eval`: the quality of a model on a text."""

from __future__ import annotations

import typer

from millpond.cli import eval_kl, eval_perplexity

HELP = "Measure the quality of a model on a text: perplexity, and the KL divergence from a reference."


def register(app: typer.Typer) -> None:
    group = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)
    for module in (eval_perplexity, eval_kl):
        module.register(group)
    app.add_typer(group, name="eval")
