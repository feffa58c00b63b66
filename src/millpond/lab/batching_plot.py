"""The picture of `millpond bench batching`: a row for each request, static and continuous side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from millpond.lab.batch_run import BatchRun, Row
from millpond.lab.picture import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Face, edge (for the hatch), hatch and name of each kind of span.
Look = tuple[str, str, str | None, str]
WAITING: Look = ("#e9edf1", "#e9edf1", None, "waits")
LOOKS: dict[Row, Look] = {
    Row.PREFILL: ("#33475b", "#33475b", None, "prefill"),
    Row.DECODE: ("#1b7f5c", "#1b7f5c", None, "decode"),
    Row.RECOMPUTE: ("#e0a458", "#e0a458", None, "computed again after a preemption"),
    Row.DEAD: ("#f6dcd8", "#b23a2e", "/////", "dead: done, and waits for its batch"),
}
SHORT = (LOOKS[Row.PREFILL], LOOKS[Row.RECOMPUTE])  # drawn over what follows them
DELIVERED = "#111111"
BOUNDARY = "#8a8a8a"
HEIGHT = 0.8
LEAST_WIDTH = 0.002  # of the picture: a span as short as a step of prefill would not be seen
Spans = dict[Look, list[tuple[float, float]]]


def draw_timeline(static: BatchRun, continuous: BatchRun, unit: str, title: str, path: Path) -> None:
    """Write the picture of both runs. unit is that of their clock, "step" or "second"."""
    from matplotlib.ticker import MaxNLocator

    height = min(20.0, max(3.5, 2.2 + 0.2 * len(static.requests)))
    figure = new_figure(14, height)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    longest, num_batches = max(static.duration, continuous.duration), len(static.batches)
    draw_run(left, static, longest)
    draw_run(right, continuous, longest)
    left.set_title(f"static, {num_batches} batch{'es' * (num_batches > 1)}: {summary(static, unit)}", fontsize=10)
    right.set_title(f"continuous: {summary(continuous, unit)}", fontsize=10)
    left.set(xlim=(0, 1.01 * longest), ylim=(len(static.requests) + 0.6, 0.4), ylabel="request")
    left.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (left, right):
        axes.set_xlabel(f"{unit}s")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    draw_legend(figure, {share.kind for run in (static, continuous) for step in run.steps for share in step.shares})
    save(figure, path)


def summary(run: BatchRun, unit: str) -> str:
    """The run in a line."""
    delays = run.delays()
    return (
        f"{figure_of(run.duration)} {unit}s, {figure_of(run.goodput)} tokens/{unit}, "
        f"{run.waste:.0%} of {run.issued_tokens} positions wasted,\n"
        f"delivered after {figure_of(fmean(each.delivered for each in delays))} {unit}s on average, "
        f"inflation {fmean(each.inflation for each in delays):.1f}"
    )


def figure_of(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw_run(axes: Axes, run: BatchRun, longest: float) -> None:
    """Every request's row, the end of every batch but the last, and when each answer was delivered."""
    delays = run.delays()
    for index, spans in enumerate(spans_of(run)):
        for look, pieces in spans.items():
            face, edge, hatch, _ = look
            wide = [(start, max(width, LEAST_WIDTH * longest)) for start, width in pieces]
            place = (index + 1 - HEIGHT / 2, HEIGHT)
            order = 2 if look in SHORT else 1
            axes.broken_barh(wide, place, facecolor=face, edgecolor=edge, hatch=hatch, lw=0, zorder=order)
    for end in sorted({each.delivered for each in delays} if run.holds_answers else ())[:-1]:
        axes.axvline(end, color=BOUNDARY, lw=0.8, ls=":", zorder=0)
    delivered = [each.delivered for each in delays]
    places = range(1, len(delivered) + 1)
    axes.vlines(
        delivered, [place - 0.5 for place in places], [place + 0.5 for place in places], color=DELIVERED, lw=1.6
    )


def spans_of(run: BatchRun) -> list[Spans]:
    """By request, (start, width) of each kind; steps in a row are one span, and whatever lies between is a wait."""
    edges = [*(step.start - run.start for step in run.steps), run.duration]
    looks: list[list[Look]] = [[] for _ in run.requests]
    for number, step in enumerate(run.steps):
        for share in step.shares:
            mine = looks[share.request]
            mine += [WAITING] * (number - len(mine))
            mine.append(LOOKS[share.kind])
    found = []
    for mine in looks:
        spans: Spans = defaultdict(list)
        first = 0
        for look, steps in groupby(mine):
            last = first + len(list(steps))
            spans[look].append((edges[first], edges[last] - edges[first]))
            first = last
        found.append(spans)
    return found


def draw_legend(figure: Figure, kinds: Set[Row]) -> None:
    """Of what is in the picture."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(facecolor=face, edgecolor=edge, hatch=hatch, lw=0, label=name)
        for face, edge, hatch, name in (WAITING, *(look for kind, look in LOOKS.items() if kind in kinds))
    ]
    handles.append(Line2D([], [], marker="|", ms=9, mew=1.6, ls="", color=DELIVERED, label="answer delivered"))
    handles.append(Line2D([], [], ls=":", lw=0.8, color=BOUNDARY, label="a static batch is over"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
