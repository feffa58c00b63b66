"""`millpond verify`: what the engine promises, checked on this machine with this model."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli import loading
from millpond.cli.options import (
    DEFAULT_MODEL,
    DEFAULTS,
    Dtype,
    Isa,
    ModelOption,
    Quantize,
    examples,
    parse_counts,
)
from millpond.cli.settings import Settings
from millpond.config import KV_DTYPES

if TYPE_CHECKING:
    from rich.table import Table

    from millpond.lab.asking import Got
    from millpond.lab.determinism import Plan, Row

HELP = """Check that a request gets the same tokens and the same log probabilities, bit for bit, alone or in a crowd.

Requests of every kind (greedy, seeded, penalties, masks, n choices, scored prompts) run alone, one after another; then

crowd       in any order, some at once
chunks      prompts cut into chunks of random size
preempted   in a pool that is too small for all, so that they are preempted and resumed
cache       with the prefix cache, first empty and then warm
resumed     preempted, and resumed from the prefix cache
guesses     with guesses ahead, right ones and wrong ones
everything  all of these together, among strangers that come and are aborted
priority    with priorities, a place for half of them: some give way to others
fair        the same with tenants
http        over a loopback socket, whole and streamed

The first number of threads runs all of that, the others only alone and everything; the same bits are expected of all.
A condition that did not come about counts as a failure. The exit code is 1 for any. The fingerprint is of all
answers of requests alone: another machine or version with the same one gives the same bits. docs/DETERMINISM.md says
what is promised."""

EXAMPLES = examples(
    "millpond verify determinism",
    "millpond verify determinism --model model.gguf --requests 16 --kv-dtype auto",
    "millpond verify determinism --requests 1000 --seed 7 --conditions crowd,everything --json",
)
BRIEF = ("everything",)


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Check what is promised on this machine.", no_args_is_help=True)
    # \b keeps the lines of the help as they are written.
    group.command("determinism", help=HELP.replace("crowd  ", "\b\ncrowd  ", 1), epilog=EXAMPLES)(determinism)
    app.add_typer(group, name="verify")


@dataclass(slots=True)
class Part:
    """What one engine was checked for. fingerprint is that of the answers that its rows were compared with."""

    kv_dtype: str
    threads: int
    isa: str
    fingerprint: str
    rows: list[Row]
    seconds: float

    @property
    def name(self) -> str:
        return f"K/V {self.kv_dtype}, {self.threads} thread{'s' * (self.threads != 1)}, {self.isa}"

    def as_json(self) -> dict[str, Any]:
        figures = {each: getattr(self, each) for each in ("kv_dtype", "threads", "isa", "fingerprint")}
        return {**figures, "seconds": round(self.seconds, 1), "rows": [row.as_json() for row in self.rows]}


@dataclass(frozen=True, slots=True)
class Check:
    """What is to be checked: one engine for each kind of K/V and number of threads."""

    model: str
    plan: Plan
    kv_dtypes: tuple[str, ...]
    threads: tuple[int, ...]
    conditions: tuple[str, ...]
    dtype: str
    quantize: str
    isa: str

    def conditions_of(self, threads: int) -> tuple[str, ...]:
        return tuple(each for each in self.conditions if threads == self.threads[0] or each in BRIEF)

    @property
    def num_runs(self) -> int:
        """Of all requests, as many as `notify` is told of."""
        return len(self.kv_dtypes) * sum(1 + len(self.conditions_of(threads)) for threads in self.threads)

    def run(self, settings: Settings, notify: Callable[[str], None]) -> list[Part]:
        parts = []
        for kv_dtype in self.kv_dtypes:
            reference: dict[str, Got] = {}
            for threads in self.threads:
                part, reference = self._part(kv_dtype, threads, reference, settings, notify)
                parts.append(part)
                # One engine's memory is enough; what setting up has frozen would stay.
                gc.unfreeze()
                gc.collect()
        return parts

    def _part(
        self,
        kv_dtype: str,
        threads: int,
        reference: dict[str, Got],
        settings: Settings,
        notify: Callable[[str], None],
    ) -> tuple[Part, dict[str, Got]]:
        """One engine, of which nothing but what the requests got is left afterwards."""
        from millpond.lab.determinism import Determinism

        how = {"dtype": self.dtype, "quantize": self.quantize, "isa": self.isa}
        config = self.plan.config(**how, kv_dtype=kv_dtype, threads=threads)
        check = Determinism(loading.open_engine(self.model, config, settings), self.plan, reference)
        started = time.perf_counter()
        rows = check.run(self.conditions_of(threads), lambda name: notify(f"K/V {kv_dtype}, threads {threads}: {name}"))
        seconds = time.perf_counter() - started
        return Part(kv_dtype, threads, check.engine.config.isa, check.fingerprint, rows, seconds), check.reference

    def to_repeat(self, part: Part, row: Row) -> str:
        """The command that runs one row again."""
        name = row.condition.partition(",")[0]
        given = {
            "--model": self.model,
            "--requests": self.plan.num_requests,
            "--seed": self.plan.seed,
            "--slots": self.plan.slots,
            "--prompt-tokens": self.plan.prompt_tokens,
            "--max-tokens": self.plan.max_tokens,
            "--conditions": name if name in self.conditions else "everything",
            "--dtype": self.dtype,
            "--kv-dtype": part.kv_dtype,
            "--quantize": self.quantize,
            "--threads": ",".join(map(str, dict.fromkeys((self.threads[0], part.threads)))),
            "--isa": part.isa,
        }
        return " ".join(["millpond verify determinism", *(f"{flag} {value}" for flag, value in given.items())])


def as_table(part: Part) -> Table:
    """One engine's rows for a person."""
    from rich.table import Table

    table = Table("condition", "answers", "tokens", "steps", "what was forced", "verdict", title=part.name)
    table.title_justify = "left"
    for column in table.columns[1:4]:
        column.justify = "right"
    for index in (0, 1, 2, 3, 5):
        table.columns[index].no_wrap = True
    for row in part.rows:
        counts = f"{row.num_answers:,}", f"{row.num_tokens:,}", f"{row.counts.steps:,}"
        table.add_row(row.condition, *counts, forced(row), row.verdict)
    return table


def forced(row: Row) -> str:
    """What came about in a run, and what should have and did not."""
    counts = asdict(row.counts)
    texts = {
        "others": "up to {} others",
        "cut": "{} cuts",
        "preempted": "{} preempted",
        "displaced": "{} displaced",
        "found": "{} tokens found",
        "resumed": "{} found again",
        "right": "{} guesses right",
        "wrong": "{} wrong",
        "aborted": "{} aborted",
        "streamed": "{} streamed",
    }
    said = [text.format(f"{counts[name]:,}") for name, text in texts.items() if counts[name] or name in row.missing]
    return ", ".join(said)


def difference_lines(check: Check, part: Part, row: Row) -> list[str]:
    """Where the first answer of a row that differs does so, and how to see it again."""
    difference, lines = row.difference, []
    if difference is not None:
        at = "" if difference.position is None else f" at position {difference.position}"
        lines += [
            f"{row.num_different} of {row.num_answers} answers differ; the first: request {difference.request}, "
            f"{difference.where}{at}",
            f"  expected  {shown(difference.expected)}",
            f"  got       {shown(difference.got)}",
        ]
    if row.missing:
        lines.append(f"not forced: {', '.join(row.missing)}; more requests may do it (--requests)")
    return [f"{part.name}, {row.condition}: {lines[0]}", *lines[1:], f"  again     {check.to_repeat(part, row)}"]


def shown(side: Any) -> str:
    """One side of a difference: a token and its score, or a text."""
    from millpond.lab.bits import Place, bits_of

    if side is None:
        return "nothing"
    if not isinstance(side, Place):
        return repr(side)
    token = "" if side.token is None else f"token {side.token!r}"
    score = "" if side.logprob is None else f"logprob {side.logprob!r} (bits {bits_of(side.logprob)})"
    more = f"rank and the likeliest {side.more!r}" if side.more else ""
    return ", ".join(each for each in (token, score, more) if each)


def show(check: Check, parts: list[Part]) -> None:
    """Everything for a person; the verdict last."""
    from rich.console import Console

    for part in parts:
        Console().print(as_table(part))
        typer.echo(f"fingerprint {part.fingerprint}, {part.seconds:.0f} s\n")
    bad = [(part, row) for part in parts for row in part.rows if row.verdict != "same"]
    for part, row in bad:
        typer.echo("\n".join(difference_lines(check, part, row)))
    rows = [row for part in parts for row in part.rows]
    tokens = sum(row.num_tokens for row in rows)
    seen = f"{len(rows)} runs, {tokens:,} tokens, {sum(part.seconds for part in parts):.0f} s"
    if bad:
        typer.echo(f"verdict: {verdict(parts).upper()} in {len(bad)} of {len(rows)} runs ({seen})")
    else:
        typer.echo(f"verdict: the same tokens and the same bits in every run ({seen})")


def verdict(parts: list[Part]) -> str:
    """The worst of all rows."""
    verdicts = {row.verdict for part in parts for row in part.rows}
    return next((each for each in ("different", "not forced") if each in verdicts), "same")


def parse_kv_dtypes(text: str | None, dtype: str) -> tuple[str, ...]:
    """Kinds of K/V from "auto,int8"; all that go with the dtype where none is named."""
    if text is None:
        return KV_DTYPES if dtype == DEFAULTS.dtype else (DEFAULTS.kv_dtype,)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names or ("",) if name not in KV_DTYPES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(KV_DTYPES)}", param_hint="'--kv-dtype'")
    return names


def parse_threads(text: str | None) -> tuple[int, ...]:
    """Numbers of threads from "2,1"; the usable cores and 1 where none is named."""
    if text is not None:
        if counts := tuple(dict.fromkeys(parse_counts(text, "--threads"))):
            return counts
        raise typer.BadParameter("name at least one number of threads", param_hint="'--threads'")
    from millpond.kernels.threads import thread_count

    return tuple(dict.fromkeys((thread_count(None), 1)))


def determinism(
    context: typer.Context,
    model: ModelOption = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option("--requests", help="How many requests.")] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Of the requests and of what befalls them.")] = 0,
    slots: Annotated[int, typer.Option("--slots", help="How many requests run at once.")] = 12,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of the longest prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of the longest answer.")] = 20,
    conditions: Annotated[
        str | None, typer.Option("--conditions", metavar="NAME,NAME", help="Which of them [default: all]")
    ] = None,
    dtype: Dtype = DEFAULTS.dtype,
    kv_dtype: Annotated[
        str | None,
        typer.Option("--kv-dtype", metavar="NAME,NAME", help="Each by itself [default: auto,int8 as the dtype allows]"),
    ] = None,
    quantize: Quantize = DEFAULTS.quantize,
    threads: Annotated[
        str | None, typer.Option("--threads", metavar="N,N", help="All must agree [default: the usable cores and 1]")
    ] = None,
    isa: Isa = DEFAULTS.isa,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object: verdict, and for each engine its rows and fingerprint.")
    ] = False,
) -> None:
    from millpond.cli.progress import counting_bar
    from millpond.lab.determinism import CONDITIONS, Plan, check_conditions

    plan = Plan(num_requests=requests, seed=seed, slots=slots, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    names = tuple(CONDITIONS) if conditions is None else tuple(each.strip() for each in conditions.split(","))
    check_conditions(names)
    kinds = parse_kv_dtypes(kv_dtype, dtype)
    check = Check(model, plan, kinds, parse_threads(threads), names, dtype, quantize, isa)
    with counting_bar(check.num_runs) as notify:
        parts = check.run(context.ensure_object(Settings), notify)
    if as_json:
        typer.echo(json.dumps(report(check, parts)))
    else:
        show(check, parts)
    if verdict(parts) != "same":
        raise typer.Exit(1)


def report(check: Check, parts: list[Part]) -> dict[str, Any]:
    """Everything for a program."""
    plan = {"model": check.model, "dtype": check.dtype, "quantize": check.quantize, **asdict(check.plan)}
    return {"verdict": verdict(parts), **plan, "parts": [part.as_json() for part in parts]}
