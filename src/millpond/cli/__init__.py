"""The command line: reads arguments and the environment, calls the library, prints."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The entry point of the command `millpond`."""
    try:
        # Here, so that Ctrl-C during the imports ends as quietly as it does later.
        from millpond.cli.app import INTERRUPTED, run
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        sys.exit(run(sys.argv[1:], dict(os.environ)))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
