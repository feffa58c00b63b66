"""The names of the parts of a model whose GGUF is split into several files."""

from __future__ import annotations

import re

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.ASCII)


def part_names(name: str) -> list[str]:
    """The names of all parts of a split model, where `name` is that of one of them, else the name alone."""
    match = PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{part:05}-of-{match[3]}.gguf" for part in range(1, int(match[3]) + 1)]
