"""A picture of what `millpond bench kernels` measured: the roofline, and where the time of each step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.lab.picture import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_SHARE = 0.05  # of a step: a phase below it has no name in the picture
INTENSITIES = (0.1, 1000.0)  # operations per byte


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a report as `bench kernels --json` prints it."""
    steps = report["steps"]
    figure = new_figure(13, 4 + 0.35 * len(steps))
    left, right = figure.subplots(1, 2)
    machine = report["machine"]
    draw_roofs(left, machine)
    draw_phases(left, steps)
    draw_shares(right, steps)
    figure.suptitle(f"millpond, {machine['isa']} kernels, {machine['threads']} threads")
    save(figure, path)


def draw_roofs(axes: Axes, machine: Mapping[str, Any]) -> None:
    """The slope is what memory can feed; each flat line is a kind of product."""
    sizes = machine["read_bytes_s"]
    memory = sizes[max(sizes, key=int)]
    for name, rate in machine["dot_operations_s"].items():
        ridge = rate / memory
        axes.plot([INTENSITIES[0], ridge, INTENSITIES[1]], [INTENSITIES[0] * memory / 1e9, rate / 1e9, rate / 1e9])
        axes.annotate(name, (INTENSITIES[1], rate / 1e9), ha="right", va="bottom", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of the least work", ylabel="G operations/s")
    axes.set_title("what the machine allows, and what each phase reaches", fontsize=10)
    axes.grid(alpha=0.3)


def draw_phases(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """A point for each phase with products: its operations over its bytes, its operations over its time."""
    names = sorted({row["phase"] for step in steps for row in step["phases"] if row["operations"]})
    for marker, name in zip("osD^vP*Xhd", names, strict=False):
        rows = [row for step in steps for row in step["phases"] if row["phase"] == name]
        intensity = [row["operations"] / row["num_bytes"] for row in rows]
        reached = [row["operations"] / row["us"] / 1e3 for row in rows]
        axes.scatter(intensity, reached, marker=marker, s=25, label=name)
    axes.legend(fontsize=8, loc="lower right")


def draw_shares(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """A bar for each step, cut into its phases; the dark part of a phase is its floor."""
    for place, step in enumerate(steps):
        start = 0.0
        for row in step["phases"]:
            least = min(row["floor_us"], row["us"]) / step["us"]
            axes.barh(place, row["share"], left=start, color="lightsteelblue", edgecolor="white")
            axes.barh(place, least, left=start, height=0.4, color="steelblue")
            if row["share"] >= LEAST_SHARE:
                axes.annotate(row["phase"], (start + row["share"] / 2, place + 0.3), ha="center", fontsize=6)
            start += row["share"]
    labels = [f"{step['name']}\n{step['us'] / 1e3:.1f} ms" for step in steps]
    axes.set_yticks(range(len(steps)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the step")
    axes.set_title("where the time goes; dark is each phase's floor", fontsize=10)
