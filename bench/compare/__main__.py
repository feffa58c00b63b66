"""python -m bench.compare COMMIT: is the working tree faster or slower than that commit? Exit code 1: a row is slower.

Both sides run `millpond bench engine` in processes of their own, in turns (A B, B A, ...), with their own sources and
kernels. What is compared are ratios within a round: absolute figures drift with the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.compare.counters import CountersUnavailableError, count_during
from bench.compare.sides import CompareError, Rows, Side, commit_of, git, side_of_commit, side_of_working_tree
from bench.compare.verdict import SLOWER, RowVerdict, judge_all, order, rule
from millpond.cli.progress import counting_bar

SLOWER_EXIT, FAILED_EXIT = 1, 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found: a verdict for each row; new over base of the instructions, or why there is no count of them."""

    base: str
    verdicts: list[RowVerdict]
    instructions: dict[str, float]
    no_instructions: str
    threshold: float

    def as_json(self) -> dict[str, object]:
        return {
            "base_commit": self.base,
            "new_commit": git("rev-parse", "HEAD").decode().strip(),
            "new_has_changes": bool(git("status", "--porcelain", "--", "src").strip()),
            "machine": platform.machine(),
            "rule": rule(self.threshold),
            "rows": [
                {**asdict(each), "instructions_ratio": self.instructions.get(each.name)} for each in self.verdicts
            ],
            "no_instructions": self.no_instructions,
        }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=(__doc__ or "").split(":", 1)[1])
    parser.add_argument("commit", help="what to compare with: a hash, a branch, HEAD")
    parser.add_argument("--rounds", type=int, help="pairs of runs [default: 8, or 6 with --quick]")
    parser.add_argument("--quick", action="store_true", help="decode of 1 and 16 sequences and one prefill only")
    parser.add_argument("--decode", help="numbers of sequences [default: 1,4,16,64]")
    parser.add_argument("--prefill", help="prompt lengths [default: 128,512]")
    parser.add_argument(
        "--w1", action=argparse.BooleanOptionalAction, help="the mixed workload [default: not if --quick]"
    )
    parser.add_argument("--threshold", type=float, default=0.03, help="a smaller difference is none (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="a known name or a file (%(default)s)")
    parser.add_argument("--engine-arguments", default="", metavar="TEXT", help="more for both, such as '--threads 1'")
    parser.add_argument("--no-instructions", action="store_true", help="do not count instructions")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    return options


def rows_asked_for(options: argparse.Namespace) -> Rows:
    """The rows of the options, with the defaults of the quick or the whole comparison."""
    decode, prefill, w1 = ("1,16", "512", False) if options.quick else ("1,4,16,64", "128,512", True)
    return Rows(
        model=str(Path(options.model).resolve()) if Path(options.model).exists() else options.model,
        decode=decode if options.decode is None else options.decode,
        prefill=prefill if options.prefill is None else options.prefill,
        w1=w1 if options.w1 is None else options.w1,
    )


def run_rounds(
    sides: dict[str, Side], rows: Rows, num_rounds: int, extra: list[str], notify: Callable[[str], None]
) -> dict[str, list[dict[str, float]]]:
    """Every run in turn. The first run of a side compiles its kernels before it measures anything."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for name in order(num_rounds, "base", "new"):
        notify(f"{name}, round {len(runs[name]) + 1} of {num_rounds}")
        runs[name].append(sides[name].bench(rows, extra))
    return runs


def instruction_ratios(sides: dict[str, Side], rows: Rows, extra: list[str]) -> dict[str, float]:
    """New over base of the instructions that each row takes on one thread, less those of starting up.

    On one thread, for threads that wait for each other spin. Raises CountersUnavailableError.
    """

    def count(side: Side, which: Rows) -> int:
        return count_during(lambda: side.bench(which, [*extra, "--threads", "1"]))

    start = {name: count(side, rows.none()) for name, side in sides.items()}
    ratios = {}
    for name, row in rows.each():
        own = {side: count(sides[side], row) - start[side] for side in sides}
        ratios[name] = own["new"] / own["base"]
    return ratios


def compare(options: argparse.Namespace, folder: Path, console: Console) -> Comparison:
    """Make both sides in the folder, run them, judge."""
    commit, rows, extra = commit_of(options.commit), rows_asked_for(options), shlex.split(options.engine_arguments)
    base, new = side_of_commit(commit, folder / "base"), side_of_working_tree(folder / "new")
    sides = {side.name: side for side in (base, new)}
    num_rounds = options.rounds or (6 if options.quick else 8)
    for side in sides.values():
        side.check()
    with counting_bar(2 * num_rounds + (not options.no_instructions), console) as notify:
        runs = run_rounds(sides, rows, num_rounds, extra, notify)
        ratios, why_not = {}, "not asked for"
        if not options.no_instructions:
            notify("counting instructions")
            try:
                ratios, why_not = instruction_ratios(sides, rows, extra), ""
            except CountersUnavailableError as error:
                why_not = str(error)
    return Comparison(commit, judge_all(runs, options.threshold), ratios, why_not, options.threshold)


def as_table(found: Comparison) -> Table:
    title = f"tok/s of the working tree (new) against {found.base[:9]} (base)"
    table = Table("row", "base", "new", "ratio", "between", "instr.", "verdict", title=title, title_justify="left")
    for index in range(1, 6):
        table.columns[index].justify = "right"
    for each in found.verdicts:
        speeds = [f"{sorted(side)[len(side) // 2]:.0f}" for side in (each.base_tok_s, each.new_tok_s)]
        count = f"{found.instructions[each.name]:.4f}" if each.name in found.instructions else ""
        spread = f"{each.low:.3f} - {each.high:.3f}"
        table.add_row(each.name, *speeds, f"{each.ratio:.3f}", spread, count, each.verdict)
    return table


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, 1 where a row is slower, 2 where nothing could be compared."""
    options, console = parse(arguments), Console(stderr=True)
    try:
        with tempfile.TemporaryDirectory(prefix="millpond-compare-") as folder:
            found = compare(options, Path(folder), console)
    except CompareError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED_EXIT
    if options.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        Console().print(as_table(found))
        print(rule(found.threshold))
        if found.no_instructions:
            print(f"instruction counts: none, {found.no_instructions}")
    return SLOWER_EXIT if any(each.verdict == SLOWER for each in found.verdicts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
