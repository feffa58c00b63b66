"""A picture of what `millpond simulate` found: the pool and the queues over time, and the spread of the latencies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.lab.picture import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENCIES = {"ttft": "TTFT", "itl": "ITL", "e2e": "end to end"}
COLORS = {"simulated": "steelblue", "real": "darkorange"}
USED, RUNNING, WAITING, PREEMPTED = "steelblue", "seagreen", "darkorange", "crimson"


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a report as `simulate --json` prints it."""
    figure = new_figure(11, 8)
    pool, queues, latencies = figure.subplots(3, 1, height_ratios=(2, 2, 2.2))
    draw_pool(pool, report["pool"])
    draw_queues(queues, report["pool"])
    queues.sharex(pool)
    pool.margins(x=0.0)
    draw_latencies(latencies, report)
    found = report["simulated"]
    figure.suptitle(
        f"{found['requests']:,} requests in {found['seconds']:,.0f} virtual seconds: "
        f"{found['output_tok_s']:,.0f} output tok/s, {found['preemptions']:,} preemptions"
    )
    save(figure, path)


def edges(pool: Mapping[str, Any]) -> list[float]:
    """Where the spans of the timeline begin, and where the last one ends."""
    starts = [each["start"] for each in pool["timeline"]]
    return [*starts, starts[-1] + pool["span_seconds"]]


def add_legend(axes: Axes) -> None:
    """On the right above the axes, where nothing is drawn."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False)


def draw_pool(axes: Axes, pool: Mapping[str, Any]) -> None:
    """Blocks in use, and a stroke for each span in which somebody was preempted."""
    used = [each["used_blocks"] for each in pool["timeline"]]
    axes.stairs(used, edges(pool), fill=True, color=USED, alpha=0.5)
    axes.axhline(pool["num_blocks"], color="black", lw=1, ls="--")
    evicting = [each for each in pool["timeline"] if each["num_preempted"]]
    if evicting:
        middle = [each["start"] + pool["span_seconds"] / 2 for each in evicting]
        axes.plot(middle, [1.04 * pool["num_blocks"]] * len(middle), "|", color=PREEMPTED, label="preemptions")
        add_legend(axes)
    axes.set(ylim=(0, 1.1 * pool["num_blocks"]), ylabel="blocks in use")
    axes.set_title(f"the pool of {pool['num_blocks']:,} blocks", fontsize=10, loc="left")
    axes.grid(alpha=0.25)


def draw_queues(axes: Axes, pool: Mapping[str, Any]) -> None:
    """How many requests run and wait."""
    for name, color, label in (("num_running", RUNNING, "running"), ("num_waiting", WAITING, "waiting")):
        axes.stairs([each[name] for each in pool["timeline"]], edges(pool), color=color, lw=1.5, label=label)
    axes.set(xlabel="virtual seconds", ylabel="requests", ylim=(0, None))
    axes.set_title(f"means over {pool['span_seconds']:g} s", fontsize=10, loc="left")
    add_legend(axes)
    axes.grid(alpha=0.25)


def draw_latencies(axes: Axes, report: Mapping[str, Any]) -> None:
    """A bar from p50 to p99 for each latency and run, with a stroke at p90; the SLO as a dashed line."""
    sides = [side for side in COLORS if report.get(side)]
    goodput = report["simulated"]["goodput"] or {}
    for row, (name, label) in enumerate(LATENCIES.items()):
        for place, side in enumerate(sides):
            found, y = report[side][f"{name}_s"], row + 0.3 * (place - (len(sides) - 1) / 2)
            if found:
                draw_spread(axes, found, y, COLORS[side], f"{label}, {side}")
        if (bound := goodput.get(name)) is not None:
            axes.plot([bound, bound], [row - 0.4, row + 0.4], "--", color="black", lw=1)
            axes.annotate("SLO", (bound, row - 0.4), ha="center", fontsize=7)
    axes.set_yticks(range(len(LATENCIES)), list(LATENCIES.values()))
    axes.set(xscale="log", xlabel="seconds", ylim=(len(LATENCIES) - 0.4, -0.6))
    axes.xaxis.set_major_formatter("{x:g}")
    names = ", ".join(f"{side} in {'blue' if side == 'simulated' else 'orange'}" for side in sides)
    axes.set_title(f"latencies from p50 to p99, a stroke at p90: {names}", fontsize=10, loc="left")
    axes.grid(alpha=0.25, axis="x", which="both")


def draw_spread(axes: Axes, found: Mapping[str, float], y: float, color: str, name: str) -> None:
    """One bar with its figures at both ends."""
    low, middle, high = found["p50"], found["p90"], found["p99"]
    axes.plot([low, high], [y, y], color=color, lw=7, alpha=0.7, solid_capstyle="butt", gid=name)
    axes.plot([middle], [y], "|", color="white", ms=8, mew=2)
    axes.annotate(f"{low:.3g} ", (low, y), ha="right", va="center", fontsize=8)
    axes.annotate(f" {high:.3g}", (high, y), ha="left", va="center", fontsize=8)
