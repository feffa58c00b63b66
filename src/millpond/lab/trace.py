"""Workloads that were written down: the JSONL trace of a server's requests."""

from __future__ import annotations

import json
import math
from pathlib import Path

from millpond.errors import ConfigError
from millpond.lab.workload import WorkloadRequest

KEYS = ("arrival", "prompt_tokens", "output_tokens")


def read_trace(path: Path) -> tuple[WorkloadRequest, ...]:
    """The requests of a file with a line {"arrival": seconds, "prompt_tokens": n, "output_tokens": n} for each.

    In order of arrival; other keys are left alone. A prompt repeats one token, the number of its line.
    Raises ConfigError naming the line, OSError for a file that cannot be read.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    requests = [_request(line, number, path.name) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"{path.name} holds no request")
    return tuple(sorted(requests, key=lambda request: request.arrival))


def _request(line: str, number: int, name: str) -> WorkloadRequest:
    where = f"{name}, line {number}"
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not record.keys() >= set(KEYS):
        raise ConfigError(f"{where} is not an object with {', '.join(KEYS)}: {line.strip()[:80]!r}")
    arrival = record["arrival"]
    if not isinstance(arrival, int | float) or isinstance(arrival, bool) or not 0 <= arrival < math.inf:
        raise ConfigError(f"{where}: arrival must be seconds of at least 0, got {arrival!r}")
    for key in KEYS[1:]:
        if not isinstance(record[key], int) or isinstance(record[key], bool) or record[key] < 1:
            raise ConfigError(f"{where}: {key} must be an integer of at least 1, got {record[key]!r}")
    return WorkloadRequest(float(arrival), (number,) * record["prompt_tokens"], record["output_tokens"])
