"""What all pictures of the lab share: a figure that no window or setting of the user has a say in, and its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 120


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, its size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write it in the format of the name, .png, .svg or .pdf."""
    figure.savefig(path, dpi=DOTS_PER_INCH)


def apart(axes: Axes, places: Sequence[tuple[float, float]], width: float, height: float) -> list[bool]:
    """Which of some places have room for a label, width by height in shares of the axes, beside those that have one.

    Earlier places come first. The limits of the axes must be what they will be.
    """
    axes.get_xlim(), axes.get_ylim()  # settles limits that are still to be found
    to_shares = axes.transData - axes.transAxes
    labelled: list[tuple[float, float]] = []
    found = []
    for place in places:
        x, y = to_shares.transform(place)
        found.append(all(abs(x - other) >= width or abs(y - another) >= height for other, another in labelled))
        if found[-1]:
            labelled.append((x, y))
    return found
