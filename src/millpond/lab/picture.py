"""What all pictures of the lab share: a figure that no window or setting of the user has a say in, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
