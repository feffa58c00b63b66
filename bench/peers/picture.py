"""The table as a picture: bars for every row, each row in its own scale, millpond's in a colour of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.peers.report import OURS, Row, number

COLUMNS = 4
OUR_COLOUR = "#1b7f5c"
PEER_COLOURS = ("#8da0b6", "#b6a38d", "#a58db6", "#8db6a5", "#b68d97", "#97b68d")


def draw(some: Sequence[Row], contenders: Sequence[str], title: str, path: Path) -> None:
    """Write a PNG or SVG, by the name's ending. Bars are medians; the thin line spans all rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(some) // COLUMNS)
    figure, grid = pyplot.subplots(lines, COLUMNS, figsize=(3.4 * COLUMNS, 2.1 * lines), squeeze=False)
    for axes, row in zip(grid.flat, some, strict=False):
        _draw_row(axes, row, contenders)
    for axes in list(grid.flat)[len(some) :]:
        axes.axis("off")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def colours(contenders: Sequence[str]) -> dict[str, str]:
    """millpond keeps its own, the others take theirs in order."""
    peers = [name for name in contenders if name != OURS]
    chosen = {name: PEER_COLOURS[index % len(PEER_COLOURS)] for index, name in enumerate(peers)}
    return {**chosen, OURS: OUR_COLOUR}


def _draw_row(axes: object, row: Row, contenders: Sequence[str]) -> None:
    names = [name for name in contenders if name in row.cells]
    cells = [row.cells[name] for name in names]
    medians = [cell.median for cell in cells]
    errors = [[cell.median - cell.least for cell in cells], [cell.most - cell.median for cell in cells]]
    chosen = colours(contenders)
    bars = axes.barh(names, medians, xerr=errors, color=[chosen[name] for name in names], ecolor="#555555")
    axes.bar_label(bars, [number(value) for value in medians], fontsize=7, padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.22)
    better = "more is better" if row.more_is_better else "less is better"
    axes.set_title(f"{row.title} ({row.unit}, {better})", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
