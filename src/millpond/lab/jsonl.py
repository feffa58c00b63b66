"""Files with a JSON object on each line, read with suspicion: the traces and step records that people bring."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millpond.errors import ConfigError

MOST_BYTES = 256 << 20
SHOWN = 60  # characters of a damaged line


def read_objects(path: Path, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object and its place in the file, for messages; blank lines are passed over.

    Raises ConfigError naming the line, or ending in the remedy where there is no file or nothing in it.
    """
    if not path.exists():
        raise ConfigError(f"there is no file {path}; {remedy}")
    if not path.is_file():
        raise ConfigError(f"{path} is a folder, a pipe or a device, not a file; {remedy}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ConfigError(f"{path} has {size} bytes, more than the {MOST_BYTES} that are read; {remedy}")
    is_empty = True
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line := line.strip():
                is_empty = False
                place = f"{path}, line {number}"
                yield place, _object(line, place)
    if is_empty:
        raise ConfigError(f"{path} is empty; {remedy}")


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{place} is not a JSON object: {line[:SHOWN]!r}")
    return found


def whole_number(fields: Mapping[str, Any], key: str, place: str, least: int, most: int) -> int:
    """The integer of a key. Raises ConfigError unless it is there and from least to most."""
    value = fields.get(key)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{place}: {key} must be a whole number from {least} to {most}, got {_shown(value)}")
    return value


def number(fields: Mapping[str, Any], key: str, place: str, least: float, most: float = math.inf) -> float:
    """The finite number of a key. Raises ConfigError unless it is there and from least to most."""
    value = fields.get(key)
    if type(value) not in (int, float) or value is None or not least <= value <= most or value == math.inf:
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigError(f"{place}: {key} must be a number {bounds}, got {_shown(value)}")
    return float(value)


def name(fields: Mapping[str, Any], key: str, place: str) -> str:
    """The text or the integer of a key, as text; "" where it is not there or null. Raises ConfigError for the rest."""
    value = fields.get(key)
    if value is None:
        return ""
    if type(value) not in (str, int):
        raise ConfigError(f"{place}: {key} must be a text or a whole number, got {_shown(value)}")
    return str(value)


def _shown(value: object) -> str:
    """What was found, not all of it where it is long."""
    if value is None:
        return "nothing"
    if type(value) is int and value.bit_length() > 200:  # Python refuses to write thousands of digits
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
