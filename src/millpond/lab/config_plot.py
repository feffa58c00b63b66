"""A picture of what `millpond sweep config` found: throughput against p99 TTFT, the Pareto front, and the advice."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.lab.config_sweep import Point, advise, choose, describe, pareto
from millpond.lab.picture import apart, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#440154", "#3b6ea5", "#21a08c", "#6cbf4b", "#e0a82e", "#d1603d", "#a83279", "#777777")
MARKERS = "osD^vP*X"
DARK = "#444444"


def draw(points: Sequence[Point], swept: Sequence[str], path: Path) -> None:
    """Write the picture: a curve over the rates for each setting.

    Of the swept fields, the one with the most values gives the colours and the next one the markers.
    """
    from matplotlib.ticker import LogLocator

    figure = new_figure(10, 6.5)
    axes = figure.subplots()
    draw_curves(axes, points, sorted(swept, key=lambda name: -len(_values(points, name)))[:2])
    axes.set(
        yscale="log", xlabel="output tokens a second (right is better)", ylabel="p99 TTFT, seconds (down is better)"
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.margins(y=0.12)
    draw_front(axes, points, swept)
    axes.grid(alpha=0.25, which="both")
    axes.set_title("\n".join(textwrap.wrap(advise(points, swept), 105)), fontsize=10, loc="left")
    save(figure, path)


def _values(points: Sequence[Point], name: str) -> list[int]:
    return sorted({getattr(point.setting, name) for point in points})


def draw_curves(axes: Axes, points: Sequence[Point], shown: Sequence[str]) -> None:
    """A line with a mark for each rate, and a legend for each of the (at most two) fields that are shown."""
    looks = [{value: place for place, value in enumerate(_values(points, name))} for name in shown]
    for setting, curve in groupby(points, key=lambda point: point.setting):
        places = [look[getattr(setting, name)] for name, look in zip(shown, looks, strict=True)]
        color, marker, *_ = *places, 0, 0
        found = list(curve)
        axes.plot(
            [point.output_tok_s for point in found],
            [point.ttft_p99 for point in found],
            color=COLORS[color % len(COLORS)],
            marker=MARKERS[marker % len(MARKERS)],
            markeredgecolor="white",
            lw=1,
            alpha=0.9,
        )
    for place, (name, look) in enumerate(zip(shown, looks, strict=True)):
        add_legend(axes, name.replace("_", " "), look, by_color=place == 0)


def add_legend(axes: Axes, title: str, look: dict[int, int], *, by_color: bool) -> None:
    """The values of one field, beside the axes: those with colours above, those with markers in the middle."""
    handles = []
    for value, place in look.items():
        color = COLORS[place % len(COLORS)] if by_color else DARK
        marker = "o" if by_color else MARKERS[place % len(MARKERS)]
        handles += axes.plot([], [], linestyle="", color=color, marker=marker, label=str(value))
    axes.figure.legend(
        handles=handles,
        title=title,
        loc="outside right upper" if by_color else "outside right center",
        fontsize=8,
        title_fontsize=8,
        frameon=False,
    )


def draw_front(axes: Axes, points: Sequence[Point], swept: Sequence[str]) -> None:
    """A band along the front, with rates, and a name where it passes to another setting; a ring around the advice."""
    front, chosen = pareto(points), choose(points)
    x, y = [point.output_tok_s for point in front], [point.ttft_p99 for point in front]
    axes.plot(x, y, color="lightsteelblue", lw=9, alpha=0.6, solid_capstyle="round", zorder=1)
    named, (left, right) = None, axes.get_xlim()
    for point, has_room in zip(front, apart(axes, list(zip(x, y, strict=True)), 0.25, 0.04), strict=True):
        if not has_room:
            continue
        load = "" if point.rate is None else f"{point.rate:g}/s"
        name = "" if point.setting == named else describe(point.setting, swept)
        named = point.setting
        text = ": ".join(filter(None, (load, name)))
        on_right = point.output_tok_s > (left + right) / 2  # the text then goes to the left, to stay inside
        axes.annotate(
            text,
            (point.output_tok_s, point.ttft_p99),
            xytext=(-8 if on_right else 8, -17),
            ha="right" if on_right else "left",
            textcoords="offset points",
            fontsize=8,
            color=DARK,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )
    axes.scatter(chosen.output_tok_s, chosen.ttft_p99, s=230, facecolor="none", edgecolor="crimson", lw=2, zorder=4)
