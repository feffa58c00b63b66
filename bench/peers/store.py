"""The record of a run: one line of JSON for everything that was measured, so that a run can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.plan import Job, Plan
from bench.peers.site import read_json, write_json


@dataclass(frozen=True, slots=True)
class RunStore:
    """A run's folder: run.json says what was asked for, measurements.jsonl what came of it."""

    folder: Path

    @property
    def _lines(self) -> Path:
        return self.folder / "measurements.jsonl"

    def create(self, plan: Plan, facts: Mapping[str, Any]) -> None:
        """Begin a new run. Raises FileExistsError where there is one of that name."""
        self.folder.mkdir(parents=True)
        write_json(self.folder / "run.json", {"plan": plan.as_json(), "facts": dict(facts)})

    def header(self) -> dict[str, Any]:
        """What run.json holds. Raises FileNotFoundError, naming the folder, where there is no such run."""
        header = read_json(self.folder / "run.json")
        if not header:
            raise FileNotFoundError(f"there is no run in {self.folder}")
        return header

    def plan(self) -> Plan:
        return Plan.from_json(self.header()["plan"])

    def add(self, record: Mapping[str, Any]) -> None:
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """Every record so far. A last line that was cut off by a crash is left out."""
        if not self._lines.exists():
            return
        for line in self._lines.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue

    def done(self, most_noise: float = 1.0) -> set[tuple[str, str, int]]:
        """The keys of the jobs that need not be run again: not those whose last try failed, nor those during which
        others took more than this share of the cores."""
        latest = {(each["key"], each["contender"], each["round"]): each for each in self.records()}
        return {key for key, each in latest.items() if "error" not in each and not each.get("others", 0.0) > most_noise}


def record_of(job: Job, **content: Any) -> dict[str, Any]:
    """A job's line: with sample (raw figures), absent (why the engine cannot be measured so) or error."""
    key, contender, round_ = job.key
    return {"key": key, "contender": contender, "round": round_, **content}
