"""From a run's records to one table: a row for each figure, a column for each contender, and how far ahead we are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.peers.stats import Summary, percentile, ratio, summarize

OURS = "millpond"
NOISY = 0.05  # of the cores' time, taken by others: such a figure is marked
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one sample: what a row shows. read takes the sample's raw figures."""

    name: str
    unit: str
    more_is_better: bool
    value: float


def figures(key: str, sample: Mapping[str, Any]) -> Iterator[Figure]:
    """The figures of a sample, by what was measured."""
    group = key.partition("/")[0]
    if group == "prefill":
        yield Figure("", "tok/s", True, sample["prompt_tokens"] / sample["seconds"])
    elif group in ("decode", "w1", "shared"):
        yield Figure("", "tok/s", True, sample["tokens"] / sample["seconds"])
    elif group in ("startup", "first-start"):
        yield Figure("", "s", False, sample["seconds"])
    elif group in ("memory", "install"):
        yield Figure("", "MB", False, sample["bytes"] / 1e6)
    elif group == "quality":
        yield Figure("KL divergence", "x 1000", False, 1000 * sample["kl_mean"])
        yield Figure("same top token", "%", True, 100 * sample["top1"])
    elif group in ("http", "poisson"):
        if group == "http":
            yield Figure("output", "tok/s", True, sample["tokens"] / sample["seconds"])
        for percent in (50, 99):
            yield Figure(f"TTFT p{percent}", "ms", False, 1000 * percentile(sample["ttft"], percent))
        yield Figure("TPOT p50", "ms", False, 1000 * percentile(sample["tpot"], 50))
        for percent in (50, 99):
            yield Figure(f"ITL p{percent}", "ms", False, 1000 * percentile(sample["itl"], percent))


TITLES = {
    "decode": "decode, {} sequences",
    "prefill": "prefill, {} tokens",
    "w1": "W1, offline, output",
    "shared": "shared prefix of {}, output",
    "http": "W1 over HTTP",
    "poisson": "Poisson, {} a second",
    "quality": "beside llama.cpp on {}",
    "startup": "start-up, warm caches",
    "first-start": "start-up, the very first",
    "memory": "peak memory, {}",
    "install": "installed size",
}


def title(key: str, figure: str) -> str:
    group, _, size = key.partition("/")
    text = TITLES[group].format(size)
    return f"{text}, {figure}" if figure else text


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. cells has a summary for who was measured; notes says why others were not."""

    key: str
    title: str
    unit: str
    more_is_better: bool
    cells: Mapping[str, Summary]
    notes: Mapping[str, str]
    noise: float

    @property
    def ratio(self) -> float | None:
        """millpond to the best peer, above 1 where millpond is ahead; variants of millpond are no peers."""
        if OURS not in self.cells:
            return None
        peers = [cell.median for name, cell in self.cells.items() if name.partition(":")[0] != OURS]
        return ratio(self.cells[OURS].median, peers, more_is_better=self.more_is_better)

    def as_json(self) -> dict[str, Any]:
        cells = {
            name: {"median": cell.median, "least": cell.least, "most": cell.most, "rounds": cell.rounds}
            for name, cell in self.cells.items()
        }
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "more_is_better": self.more_is_better,
            "contenders": cells,
            "notes": dict(self.notes),
            "ratio_to_best_peer": self.ratio,
            "others_share_of_cores": self.noise,
        }


def rows(records: Sequence[Record]) -> list[Row]:
    """A row for each figure, groups in the order of TITLES. Warm-ups and older tries do not count."""
    latest = {(each["key"], each["contender"], each["round"]): each for each in records if each["round"] > 0}
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    kinds: dict[tuple[str, str], Figure] = {}
    notes: dict[str, dict[str, str]] = defaultdict(dict)
    noise: dict[str, list[float]] = defaultdict(list)
    for record in latest.values():
        key, name = record["key"], record["contender"]
        if "sample" not in record:
            notes[key][name] = "failed" if "error" in record else "-"
            continue
        noise[key].append(record.get("others", 0.0))
        for figure in figures(key, record["sample"]):
            kinds.setdefault((key, figure.name), figure)
            values.setdefault((key, figure.name), {}).setdefault(name, []).append(figure.value)
    found = [
        Row(
            key,
            title(key, name),
            kinds[key, name].unit,
            kinds[key, name].more_is_better,
            {contender: summarize(some) for contender, some in by_contender.items()},
            notes[key],
            max(noise[key]),
        )
        for (key, name), by_contender in values.items()
    ]
    order = list(TITLES)
    return sorted(found, key=lambda row: order.index(row.key.partition("/")[0]))


def failures(records: Sequence[Record]) -> dict[tuple[str, str], str]:
    """What went wrong and was not made good since, by measurement and contender."""
    latest = {(each["key"], each["contender"], each["round"]): each for each in records}
    return {(key, name): each["error"] for (key, name, _), each in latest.items() if "error" in each}


def absences(records: Sequence[Record]) -> list[str]:
    """Why a contender has no figure somewhere, each reason once."""
    return list(dict.fromkeys(each["absent"] for each in records if "absent" in each))


def number(value: float) -> str:
    """Three digits or more, whatever the size."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cell(row: Row, name: str) -> str:
    cell = row.cells.get(name)
    if cell is None:
        return row.notes.get(name, "")
    spread = f" [dim]±{50 * cell.spread:.0f}%[/]" if cell.rounds > 1 else ""
    return f"{number(cell.median)}{spread}"


def _ratio_cell(row: Row) -> str:
    if row.ratio is None:
        return ""
    colour = "green" if row.ratio > 1 else "red"
    return f"[{colour}]{row.ratio:.2f}x[/]"


def table(some: Sequence[Row], contenders: Sequence[str]) -> Table:
    """The table for a person: medians, half of the spread between rounds, millpond to the best of its peers."""
    shown = Table("measurement", "unit", *contenders, "to the best peer")
    for column in shown.columns[2:]:
        column.justify = "right"
    for row in some:
        mark = " [yellow]*[/]" if row.noise > NOISY else ""
        cells = [_cell(row, name) for name in contenders]
        shown.add_row(row.title + mark, row.unit, *cells, _ratio_cell(row))
    return shown


def names_of(records: Sequence[Record]) -> list[str]:
    """Every contender of the records, in the order in which they came."""
    return list(dict.fromkeys(each["contender"] for each in records))
