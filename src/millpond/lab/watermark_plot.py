"""The picture of a watermark sweep: what each reserve saves and costs, and why one is waived at the wall."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from millpond.core.scheduler import Scheduler
from millpond.lab.batchbench import WatermarkPoint
from millpond.lab.faults import WithoutWaiver
from millpond.lab.picture import apart, new_figure, save
from millpond.lab.wall import BLOCK_SIZE, NUM_BLOCKS, RESERVE, Moment, wall_moments

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHOSEN = "#1b7f5c"
AUTO_COLOUR = "#7a4fb5"
PLAIN = "#33475b"
BAD = "#b23a2e"
HOLDERS = {"a": "#8da0b6", "b": "#e0a458"}
GREY = "#8a8a8a"
PITCH = NUM_BLOCKS + 1.6  # from the first block of a moment to that of the next, in blocks


def draw_sweep(points: Sequence[WatermarkPoint], chosen: WatermarkPoint, why: str, path: Path) -> None:
    """Write the picture of some points, the one chosen among them, and the sentence that says why."""
    figure = new_figure(13, 8.2)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.2, 1), squeeze=False).flat
    top.suptitle(fill(why, 130), fontsize=10, color=CHOSEN)
    panels: list[tuple[str, Callable[[WatermarkPoint], float]]] = [
        ("preemptions", lambda point: point.preemptions),
        ("thrashed admissions", lambda point: point.thrashed_admissions),
        ("recompute share, %", lambda point: 100 * point.recompute_share),
    ]
    for axes, (name, value) in zip(top.subplots(1, len(panels)), panels, strict=True):
        draw_cost(axes, points, chosen, name, value)
    bottom.suptitle(
        f"the wall: {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens, a reserve of {RESERVE}, two requests", fontsize=11
    )
    with_waiver, without = bottom.subplots(2, 1)
    draw_moments(with_waiver, wall_moments(Scheduler), "with the waiver")
    draw_moments(without, wall_moments(WithoutWaiver), "without it")
    draw_legend(without)
    save(figure, path)


def draw_cost(
    axes: Axes,
    points: Sequence[WatermarkPoint],
    chosen: WatermarkPoint,
    name: str,
    value: Callable[[WatermarkPoint], float],
) -> None:
    """One figure of every reserve against its iterations, joined in order of the reserve."""
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator

    fixed = [(point.watermark_blocks, point) for point in points if not isinstance(point.watermark_blocks, str)]
    ordered = [point for _, point in sorted(fixed, key=itemgetter(0))]
    for point in [each for each in points if each not in ordered]:
        draw_auto(axes, point, value(point), CHOSEN if point is chosen else AUTO_COLOUR)
    axes.plot([point.iterations for point in ordered], [value(point) for point in ordered], color=GREY, lw=0.8)
    places: dict[tuple[int, float], list[int]] = defaultdict(list)
    for blocks, point in sorted(fixed, key=itemgetter(0)):
        places[point.iterations, value(point)].append(blocks)
    for (x, y), here in places.items():
        is_chosen = chosen.watermark_blocks in here
        colour = CHOSEN if is_chosen else PLAIN
        axes.plot(x, y, "o", ms=9 if is_chosen else 6, color=colour, clip_on=False, zorder=3)
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("iterations; at each point its reserve in blocks")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.12)
    axes.set_ylim(0, 1.15 * max(map(value, points)) or 1)
    for has_room, ((x, y), here) in zip(apart(axes, list(places), 0.08, 0.06), places.items(), strict=True):
        where: Mapping[str, Any] = {"xytext": (6, 5)}
        if not has_room:  # the curve goes down, so the left is free; along the bottom what is above
            where = {"xytext": (-6, -12), "ha": "right"} if y else {"xytext": (4, 20)}
        text, colour = runs_of(here), CHOSEN if chosen.watermark_blocks in here else PLAIN
        note = axes.annotate(text, (x, y), textcoords="offset points", fontsize=10, color=colour, **where)
        note.set_path_effects([withStroke(linewidth=3, foreground="white")])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def draw_auto(axes: Axes, point: WatermarkPoint, value: float, colour: str) -> None:
    """The reserve that chooses itself: a diamond, and a line across at its height."""
    axes.axhline(value, color=colour, lw=1, ls="--", zorder=1)
    axes.plot(point.iterations, value, "D", ms=8, color=colour, clip_on=False, zorder=4)
    axes.annotate("auto", (point.iterations, value), (9, 5), textcoords="offset points", fontsize=10, color=colour)


def runs_of(numbers: Sequence[int]) -> str:
    """Ascending numbers, those that follow one another as a run: "0, 2-5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def draw_moments(axes: Axes, moments: Sequence[Moment], name: str) -> None:
    """The pool at each moment of the wall, from left to right."""
    from matplotlib.patches import Rectangle

    for place, moment in enumerate(moments):
        left, held_back = place * PITCH, RESERVE
        for block, holder in enumerate(moment.holders):
            reserved = holder is None and held_back > 0
            held_back -= reserved
            colour = HOLDERS[holder] if holder else "white"
            edge = BAD if moment.stuck else PLAIN
            hatch = "////" if reserved else None
            axes.add_patch(Rectangle((left + block, 0), 1, 1, facecolor=colour, edgecolor=edge, hatch=hatch, lw=1.2))
            if holder:
                axes.annotate(holder, (left + block + 0.5, 0.48), ha="center", va="center", fontsize=10, color="white")
        middle = left + NUM_BLOCKS / 2
        colour = BAD if moment.stuck else PLAIN
        axes.annotate(f"step {moment.step}", (middle, 1.15), ha="center", fontsize=8, color=GREY)
        axes.annotate(moment.event, (middle, -0.2), ha="center", va="top", fontsize=9, color=colour)
    axes.set(xlim=(-0.2, 3 * PITCH + NUM_BLOCKS + 0.2), ylim=(-1.35, 1.5), aspect="equal")
    axes.set_title(name, fontsize=10, loc="left", pad=2)
    axes.axis("off")


def draw_legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, edgecolor=PLAIN, label=f"held by {name}") for name, colour in HOLDERS.items()]
    patches.append(Patch(facecolor="white", edgecolor=PLAIN, label="free"))
    patches.append(Patch(facecolor="white", edgecolor=PLAIN, hatch="////", label="free, kept back by the reserve"))
    axes.legend(handles=patches, ncols=4, fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.02))
