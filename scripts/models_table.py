"""Write the table of docs/MODELS.md from the descriptions of the architectures: python scripts/models_table.py."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from millpond.model.architectures import ARCHITECTURES
from millpond.model.rope import SCALINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "MODELS.md"
BEGIN, END = "<!-- made by scripts/models_table.py -->\n", "<!-- end -->\n"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """The page with what stands between its marks made anew."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "".join(f"{line}\n" for line in lines()) + END + rest.split(END)[1]


def lines() -> list[str]:
    head = ["| models | GGUF | config.json | its layer | described in |", "|---|---|---|---|---|"]
    return [*head, *(row(name) for name in ARCHITECTURES), "", f"Positions are scaled by: {', '.join(SCALINGS[1:])}."]


def row(name: str) -> str:
    """An architecture's names in files, and what its module says of it."""
    architecture = ARCHITECTURES[name]
    about = " ".join((import_module(f"millpond.model.{name}").__doc__ or "").split())
    names = (f"`{each}`" if each else "" for each in (architecture.gguf, architecture.hugging_face))
    return f"| {architecture.title} | {' | '.join(names)} | {about.split(': ', 1)[1]} | `model/{name}.py` |"


if __name__ == "__main__":
    main()
