"""Where everything of the harness lies, and what a run was told: folders, cores, model, seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_WORK = Path(__file__).resolve().parent / ".work"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
MAX_NUM_SEQS = 64


@dataclass(frozen=True, slots=True)
class Site:
    """The work folder, the model that everything is made from, and the cores that every engine is pinned to.

    Prompts are drawn from vocab_size tokens; max_model_len is the longest that the model was made for.
    """

    work: Path
    model: Path
    cores: tuple[int, ...]
    vocab_size: int
    max_model_len: int

    def environment(self, engine: str) -> Path:
        """The virtual environment of an engine."""
        return self.work / "envs" / engine

    def python(self, engine: str) -> str:
        return str(self.environment(engine) / "bin" / "python")

    @property
    def models(self) -> Path:
        """The folder of the model's variants."""
        return self.work / "models"

    def log(self, name: str) -> Path:
        return self.work / "logs" / f"{name.replace(':', '-')}.log"

    @property
    def setup_file(self) -> Path:
        return self.work / "setup.json"


def read_json(path: Path) -> dict[str, Any]:
    """What the file holds, or an empty object where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
