"""How a model that is made for embeddings makes one of its hidden states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from millpond.errors import ModelFileError, shown
from millpond.load.gguf import GGUFFile
from millpond.load.safetensors import MAX_CONFIG_BYTES, read_json, read_json_list
from millpond.model.checkpoint import ModelFile

# A GGUF's pooling_type, by number.
KINDS = ("none", "mean", "cls", "last", "rank")
FOLDER, SETTINGS = "1_Pooling", "config.json"
# The switches of sentence-transformers, of which newer files have the name of one in pooling_mode.
SWITCHES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted mean",
}
MEAN, CLS, LAST = "mean", "cls", "last"
MODULES = "modules.json"
UNDERSTOOD = ("Transformer", "Pooling", "Normalize")  # every embedding gets length 1 here


def read_pooling(file: ModelFile) -> str | None:
    """What a model file, or what sentence-transformers keeps beside it, says; None where it says nothing.

    "mean" of all hidden states, or that of the first token ("cls") or the last one; other words are for people.
    ModelFileError for what is no pooling.
    """
    if isinstance(file, GGUFFile):
        key = f"{file.metadata.get('general.architecture')}.pooling_type"
        number = file.metadata.get(key, 0)
        if not isinstance(number, int) or not 0 <= number < len(KINDS):
            raise ModelFileError(f"{file.path.name}: {key} is {number!r}, not a number from 0 to {len(KINDS) - 1}")
        return KINDS[number] if number else None
    modules = _modules(file.path.parent / MODULES)
    folder = file.path.parent
    path = folder / modules.get("Pooling", FOLDER) / SETTINGS
    if not path.exists():
        return None
    further = [kind for kind in modules if kind not in UNDERSTOOD]
    name = str(path.relative_to(folder))
    return ", then ".join([_of_settings(name, read_json(path, MAX_CONFIG_BYTES, name)), *further])


def _modules(path: Path) -> dict[str, str]:
    """The steps that sentence-transformers lists: the last word of each one's type, and its folder. {} without them."""
    if not path.exists():
        return {}
    listed = read_json_list(path, MAX_CONFIG_BYTES)
    if not all(isinstance(each, dict) and isinstance(each.get("type"), str) for each in listed):
        raise ModelFileError(f"{MODULES} must be a list of objects that have a type each, got {shown(listed)}")
    folders = {each["type"].rpartition(".")[2]: each.get("path", "") for each in listed}
    for folder in folders.values():
        if not isinstance(folder, str) or not re.fullmatch(r"(\w[\w.-]*)?", folder):
            raise ModelFileError(f"{MODULES} has the path {shown(folder)}, which is no folder's name")
    return folders


def _of_settings(file: str, settings: dict[str, Any]) -> str:
    mode = settings.get("pooling_mode")
    if mode is not None:
        modes = mode if isinstance(mode, list) else [mode]
        return " + ".join(LAST if each == "lasttoken" else str(each) for each in modes)
    for name in SWITCHES:
        if not isinstance(settings.get(name, False), bool):
            raise ModelFileError(f"{file}: {name} must be true or false, got {shown(settings[name])}")
    chosen = [kind for name, kind in SWITCHES.items() if settings.get(name)]
    if not chosen:
        raise ModelFileError(f"{file} chooses none of {', '.join(SWITCHES)}")
    return " + ".join(chosen)
