"""Options that the lab's commands share: the workload, drawn or from a trace, the cost of a step, and the SLO."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.errors import ConfigError
from millpond.lab.lengths import LONGEST, WIDEST, Lengths
from millpond.lab.workload import MOST_REQUESTS

if TYPE_CHECKING:
    from millpond.lab.cost_model import CostModel
    from millpond.lab.latency import Slo
    from millpond.lab.workload import WorkloadRequest

_IN_TURN = re.compile(r"\d+(?:\s*,\s*\d+)*")
_EVENLY = re.compile(r"(\d+)\s*-\s*(\d+)")
_LOGNORMAL = re.compile(r"lognormal:(\d+):(\d*\.?\d+):(\d+)")

# What --trace replaces, by the names of the commands' parameters.
DRAWN = ("requests", "prompt_tokens", "max_tokens", "seed", "rate", "rates", "burstiness")

LENGTHS_HELP = (
    "LENGTHS are 128 for all requests, 4,10 in turn, 32-256 drawn evenly, or lognormal:MEDIAN:SIGMA:MOST tokens."
)
TRACE_HELP = """A trace has a line {"arrival": seconds, "prompt_tokens": n, "output_tokens": n} for each request,
and may say its "tenant" and "priority"."""


def parse_lengths(given: str | Lengths) -> Lengths:
    """Lengths in tokens: "128" for all, "4,10" in turn, "32-256" evenly, or "lognormal:MEDIAN:SIGMA:MOST"."""
    if isinstance(given, Lengths):  # a default
        return given
    text = given.strip()
    shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
    if max(map(len, re.findall(r"\d+", text)), default=0) > len(str(LONGEST)):
        raise typer.BadParameter(f"{shown} holds a length above {LONGEST} tokens")
    if _IN_TURN.fullmatch(text):
        found = Lengths(tuple(map(int, text.split(","))))
        ends = min(found.choices), max(found.choices)
    elif match := _EVENLY.fullmatch(text):
        ends = int(match[1]), int(match[2])
        found = Lengths(range(ends[0], ends[1] + 1), drawn=True)
    elif match := _LOGNORMAL.fullmatch(text):
        ends = int(match[1]), int(match[3])
        found = Lengths(range(1, ends[1] + 1), drawn=True, median=ends[0], sigma=float(match[2]))
    else:
        raise typer.BadParameter(
            f"{shown} is not a length: say 128, or 4,10 in turn, or 32-256 evenly, or lognormal:MEDIAN:SIGMA:MOST"
        )
    if not 1 <= ends[0] <= ends[1] <= LONGEST:
        raise typer.BadParameter(f"{shown} must go upwards, from 1 to at most {LONGEST} tokens")
    if found.sigma > WIDEST:
        raise typer.BadParameter(f"{shown} has a SIGMA above {WIDEST:g}")
    return found


Requests = Annotated[int, typer.Option("--requests", min=1, max=MOST_REQUESTS, help="How many requests.")]
PromptTokens = Annotated[
    Lengths, typer.Option("--prompt-tokens", parser=parse_lengths, metavar="LENGTHS", help="Of the prompts.")
]
MaxTokens = Annotated[
    Lengths, typer.Option("--max-tokens", parser=parse_lengths, metavar="LENGTHS", help="Of the outputs.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of what is drawn.")]
Rate = Annotated[
    float, typer.Option("--rate", metavar="R", help="Requests a second on average; inf: they all come at once.")
]
Burstiness = Annotated[
    float,
    typer.Option(
        "--burstiness", metavar="CV", help="Unevenness of arrivals: 0 a metronome, 1 Poisson, above: bunches."
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="A recorded workload (JSONL) in place of a drawn one."),
]
Cost = Annotated[
    Path | None,
    typer.Option(
        "--cost",
        metavar="FILE",
        help="Steps that `bench engine --record` wrote [default: SmolLM2-135M on two cores of a Zen 4 server]",
    ),
]
TtftSlo = Annotated[
    float | None, typer.Option("--ttft-slo", metavar="S", help="A good request has its first token in S seconds.")
]
ItlSlo = Annotated[
    float | None,
    typer.Option("--itl-slo", metavar="S", help="A good request's later tokens take S seconds each on average."),
]

# W1's.
PROMPT_TOKENS, MAX_TOKENS = Lengths(range(32, 257), drawn=True), Lengths(range(16, 129), drawn=True)


def drawn_workload(
    requests: int,
    prompt_tokens: Lengths,
    max_tokens: Lengths,
    seed: int,
    *,
    rate: float = math.inf,
    burstiness: float = 1.0,
) -> Sequence[WorkloadRequest]:
    """The seeded workload that the options describe."""
    from millpond.lab.arrivals import Traffic

    return Traffic(
        num_requests=requests,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        rate=rate,
        burstiness=burstiness,
        seed=seed,
    ).requests()


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line, be it with the value that it has by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def traced_workload(context: typer.Context, path: Path, but: Collection[str] = ()) -> Sequence[WorkloadRequest]:
    """The trace's. Raises BadParameter beside an option that describes another one, but for those that do more."""
    from millpond.lab.trace import read_trace

    given = [name for name in DRAWN if name not in but and is_given(context, name)]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise typer.BadParameter(f"a trace brings its own requests: leave out {names}", param_hint="'--trace'")
    return read_trace(path)


def cost_model(path: Path | None) -> CostModel:
    """Fitted to the file's steps; without a file, the one that comes with millpond."""
    from millpond.lab.cost_model import BUILT_IN, fit
    from millpond.lab.step_record import read_records

    return BUILT_IN if path is None else fit(read_records(path), path.name)


def slo_of(ttft: float | None, itl: float | None) -> Slo:
    """Raises ConfigError for a bound that nothing or everything would meet."""
    from millpond.lab.latency import Slo

    for name, bound in (("--ttft-slo", ttft), ("--itl-slo", itl)):
        if bound is not None and not 0.0 < bound < math.inf:
            raise ConfigError(f"{name} must be above 0 seconds and finite, got {bound:g}; leave it out for no bound")
    return Slo(ttft, itl)
