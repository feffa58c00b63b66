"""A workload's run in figures: the same for a simulated and a real engine, and the pool over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.core.counters import SchedulerCounters
from millpond.lab.latency import Latencies, Slo
from millpond.lab.simulator import Simulation

COMPARED = ("p50", "p99")


def figures(latencies: Latencies, counters: SchedulerCounters, slo: Slo) -> dict[str, Any]:
    """Throughput, latencies in seconds, goodput where there is an SLO (else null), and what the scheduler counted."""
    seconds, num_requests = latencies.seconds, len(latencies.requests)
    return {
        "requests": num_requests,
        "seconds": seconds,
        "steps": counters.iterations,
        "output_tokens": latencies.num_output_tokens,
        "output_tok_s": latencies.num_output_tokens / seconds,
        "requests_s": num_requests / seconds,
        **{f"{name}_s": values for name, values in latencies.distributions().items()},
        "goodput": None if slo == Slo() else {**slo._asdict(), **latencies.goodput(slo)._asdict()},
        "preemptions": counters.preemptions,
        "thrashed_admissions": counters.thrashed_admissions,
        "recompute_share": counters.recompute_share,
    }


def pool_figures(simulation: Simulation) -> dict[str, Any]:
    """The pool's use: its mean over the seconds, the peaks, and means over spans of equal length."""
    pool = simulation.pool
    return {
        "num_blocks": simulation.num_blocks,
        "mean_used_blocks": pool.mean_used_blocks,
        "most_used_blocks": pool.most_used_blocks,
        "most_running": pool.most_running,
        "most_waiting": pool.most_waiting,
        "span_seconds": pool.width,
        "timeline": [span._asdict() for span in pool.spans()],
    }


def relative_errors(simulated: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, float]:
    """How far the simulation is from the real run, as a share of the real figure; below 0 it promised less."""
    pairs = {"output_tok_s": (simulated["output_tok_s"], real["output_tok_s"])}
    for name in ("ttft", "itl", "e2e"):
        for rank in COMPARED if real[f"{name}_s"] else ():
            pairs[f"{name}_{rank}"] = simulated[f"{name}_s"][rank], real[f"{name}_s"][rank]
    return {name: one / other - 1.0 for name, (one, other) in pairs.items()}
