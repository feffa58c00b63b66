"""Options that `simulate` and `sweep config` share: the workload, the cost of a step, and the SLO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.errors import ConfigError

if TYPE_CHECKING:
    from millpond.lab.cost_model import CostModel
    from millpond.lab.latency import Slo
    from millpond.lab.workload import WorkloadRequest

DEFAULT_PROMPT_TOKENS = "32-256"
DEFAULT_OUTPUT_TOKENS = "16-128"

Rate = Annotated[
    float, typer.Option("--rate", metavar="R", help="Requests a second on average; inf: they all come at once.")
]
Burstiness = Annotated[
    float,
    typer.Option(
        "--burstiness", metavar="CV", help="Unevenness of arrivals: 0 a metronome, 1 Poisson, above: bunches."
    ),
]
PromptTokens = Annotated[
    str,
    typer.Option("--prompt-tokens", metavar="LENGTHS", help="128, 32-256 (evenly), or lognormal:MEDIAN:SIGMA:MOST."),
]
OutputTokens = Annotated[str, typer.Option("--output-tokens", metavar="LENGTHS", help="In the same way.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="A workload that was recorded (JSONL: arrival in seconds, prompt_tokens, output_tokens), in place of a "
        "drawn one.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the drawn workload.")]
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


def drawn_workload(
    requests: int, rate: float, burstiness: float, prompt_tokens: str, output_tokens: str, seed: int
) -> Sequence[WorkloadRequest]:
    """The seeded workload that the options describe."""
    from millpond.lab.arrivals import Traffic, parse_lengths

    return Traffic(
        num_requests=requests,
        rate=rate,
        burstiness=burstiness,
        prompt_tokens=parse_lengths(prompt_tokens, "--prompt-tokens"),
        output_tokens=parse_lengths(output_tokens, "--output-tokens"),
        seed=seed,
    ).requests()


def traced_workload(path: Path) -> Sequence[WorkloadRequest]:
    from millpond.lab.trace import read_trace

    return read_trace(path)


def cost_model(path: Path | None) -> CostModel:
    """Fitted to the file's steps; without a file, the one that comes with millpond."""
    from millpond.lab.cost_model import BUILT_IN, fit
    from millpond.lab.step_record import read_records

    return BUILT_IN if path is None else fit(read_records(path), path.name)


def slo_of(ttft: float | None, itl: float | None) -> Slo:
    """Raises ConfigError for a bound that nothing could meet."""
    from millpond.lab.latency import Slo

    for name, bound in (("--ttft-slo", ttft), ("--itl-slo", itl)):
        if bound is not None and not bound > 0.0:
            raise ConfigError(f"{name} must be above 0 seconds, got {bound:g}")
    return Slo(ttft, itl)
