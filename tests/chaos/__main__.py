"""The long run: `make chaos`, or PYTHONPATH=tests python -m chaos --minutes 5."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from chaos.storm import run_storm

SHOWN = 20


def run() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="32 clients of every kind against one small server.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run_storm(Path(folder), options.seed, seconds=60 * options.minutes)
    print("\n".join(report.lines()))
    wrong = report.book.wrong + report.disagreements() + report.figures["errors"]
    for line in wrong[:SHOWN]:
        print(line)
    return int(bool(wrong or report.leftovers or not report.is_stopped))


if __name__ == "__main__":
    sys.exit(run())
