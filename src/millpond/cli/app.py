"""The command `millpond`: one module per command group, and what every command does with an error."""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Iterable, MutableMapping, Sequence
from importlib import import_module
from typing import Annotated

import typer

from millpond.cli.naming import in_options
from millpond.cli.options import examples
from millpond.cli.settings import Settings
from millpond.errors import ConfigError, InvalidRequestError, MillpondError
from millpond.source_hash import kernels_below
from millpond.version import __version__

INTERRUPTED = 130
EXAMPLES = examples("millpond serve smollm2", 'millpond generate "The capital of France is"', "millpond doctor")
# Each command, but `version`, and the module that has it.
MODULES = {
    "serve": "serve",
    "top": "top",
    "generate": "generate",
    "chat": "chat",
    "pull": "pull",
    "doctor": "doctor",
    "bench": "bench",
    "simulate": "simulate",
    "sweep": "sweep",
    "prove": "prove",
    "verify": "verify",
    "eval": "evaluate",
}


def make_app(names: Iterable[str] = MODULES) -> typer.Typer:
    """The command with these of its subcommands, in this order, and `version`. Nothing of the others is imported."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True, epilog=EXAMPLES)(root)
    app.command(epilog=examples("millpond version"))(version)
    for name in names:
        import_module(f"millpond.cli.{MODULES[name]}").register(app)
    return app


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """The command with the one subcommand that the arguments call, or with all where they call none that there is or
    ask about the command itself."""
    called = next((word for word in arguments if word != "--debug"), None)
    return make_app([called] if called in MODULES else MODULES)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="As `millpond version`.")
    ] = False,
) -> None:
    """An LLM inference engine and OpenAI-compatible server for the CPU you have."""
    context.ensure_object(Settings).debug = debug
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def version() -> None:
    """Print the version of millpond and of what it computes with."""
    from importlib.metadata import version as package_version

    typer.echo(f"millpond {__version__}")
    typer.echo(
        f"Python {platform.python_version()}, numpy {package_version('numpy')}, numba {package_version('numba')}"
    )


def run(arguments: Sequence[str], environment: MutableMapping[str, str]) -> int:
    """Carry out one call of the command. Returns its exit code: 0, 1 (an error), 2 (wrong usage) or 130 (Ctrl-C)."""
    settings = Settings()
    try:
        settings = Settings.from_environment(environment)
        _place_kernels(settings, environment)
        app = app_for(arguments)
        return app(list(arguments), prog_name="millpond", standalone_mode=False, obj=settings) or 0
    except typer.TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except (MillpondError, OSError, MemoryError) as error:
        if settings.debug:
            traceback.print_exc()
        return _complain(_message(error, arguments), 1)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _place_kernels(settings: Settings, environment: MutableMapping[str, str]) -> None:
    """Have Numba, which looks at the environment when it is imported, keep what it compiles below our cache folder,
    unless it was told of another."""
    if settings.cache_folder is not None and settings.kernels_folder is None:
        environment["NUMBA_CACHE_DIR"] = str(kernels_below(settings.cache_folder))


def _message(error: Exception, arguments: Sequence[str]) -> str:
    if isinstance(error, ConfigError | InvalidRequestError):
        return in_options(str(error), typer.main.get_command(app_for(arguments)), arguments)
    return f"not enough memory: {error}" if isinstance(error, MemoryError) else str(error)


def _complain(message: str, exit_code: int) -> int:
    """One line on standard error, whatever the message is made of."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code
