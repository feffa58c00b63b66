"""A picture of what `millpond bench serve` measured: how TTFT and ITL are spread, and the requests under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.lab.load_report import in_flight
from millpond.lab.load_test import LoadRun
from millpond.lab.picture import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BINS = 60
LEAST_SECONDS = 1e-4  # what came together stands at the left end of the axis
SPREAD, FAILED, FLIGHT = "steelblue", "crimson", "seagreen"


def draw(run: LoadRun, report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a run and of its report as `bench serve --json` prints it."""
    good = [each for each in run.records if each.is_ok]
    bounds = report["goodput"] or {}
    figure = new_figure(11, 8)
    places = figure.add_gridspec(2, 2, height_ratios=(1.2, 1))
    left, right = figure.add_subplot(places[0, 0]), figure.add_subplot(places[0, 1])
    draw_spread(left, [each.times.ttft for each in good], report["ttft_s"], "TTFT", bounds.get("ttft"))
    draw_spread(right, [gap for each in good for gap in each.gaps], report["itl_s"], "ITL", bounds.get("itl"))
    draw_flight(figure.add_subplot(places[1, :]), run)
    figure.suptitle(
        f"{report['requests']:,} requests in {report['seconds']:,.1f} s: {report['output_tok_s']:,.1f} output tok/s, "
        f"{report['failed']:,} failed"
    )
    save(figure, path)


def draw_spread(
    axes: Axes, values: Sequence[float], found: Mapping[str, float], name: str, bound: float | None
) -> None:
    """A histogram over the logarithm of seconds, its median and p99 as lines, the SLO as a dashed one."""
    import numpy

    if values:
        numbers = numpy.maximum(values, LEAST_SECONDS)
        low, high = float(numbers.min()), float(numbers.max())
        num_bins = min(MOST_BINS, 8 + 2 * math.isqrt(len(values)))
        bins = numpy.geomspace(low / 1.05, high * 1.05, num_bins + 1).tolist()
        axes.hist(numbers, bins=bins, color=SPREAD, alpha=0.6)
        for rank in ("p50", "p99"):
            axes.axvline(max(found[rank], LEAST_SECONDS), color="black", lw=1, gid=f"{name} {rank}")
            place = (max(found[rank], LEAST_SECONDS), 1.0)
            text = f" {rank} {1e3 * found[rank]:,.4g} ms"
            shade = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1}
            axes.annotate(
                text, place, xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=8, bbox=shade
            )
    if bound is not None:
        axes.axvline(bound, color="black", lw=1, ls="--", gid=f"{name} SLO")
    axes.set(xscale="log", xlabel="seconds", ylabel="requests" if name == "TTFT" else "pieces of text")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
    axes.tick_params(which="both", labelsize=8)
    axes.set_title(f"{name}, {len(values):,} of them", fontsize=10, loc="left")
    axes.grid(alpha=0.25)


def draw_flight(axes: Axes, run: LoadRun) -> None:
    """Requests under way over time, and a stroke where one failed."""
    moments, numbers = zip(*in_flight(run.records), strict=True)
    axes.step(moments, numbers, where="post", color=FLIGHT, lw=1.2)
    failed = [each.ended for each in run.records if not each.is_ok]
    if failed:
        axes.plot(failed, [1.04 * max(numbers)] * len(failed), "|", color=FAILED, gid="failed", label="failed")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    axes.set(xlabel="seconds from the start", ylabel="requests", ylim=(0, 1.1 * max(numbers)))
    axes.set_title("requests under way", fontsize=10, loc="left")
    axes.grid(alpha=0.25)
