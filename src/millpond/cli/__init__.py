"""The command line: reads arguments and the environment, calls the library, prints."""

from __future__ import annotations

import io
import os
import sys

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def main() -> None:
    """The entry point of the command `millpond`."""
    _prepare_streams()
    try:
        # Here, so that Ctrl-C during the imports ends as quietly as it does later.
        from millpond.cli.app import INTERRUPTED, run
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        sys.exit(run(sys.argv[1:], os.environ))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _prepare_streams() -> None:
    """Make the standard streams take whatever comes, so that no locale and no closed stream ends in a traceback."""
    for name, mode in STREAMS:  # in the order of their descriptors: what is opened takes the lowest free one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (it stays open, as they do)
    # Bytes that are not text become what the tokenizer refuses in one line.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    # As Python's own standard error does: what the encoding lacks is shown by its code.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
