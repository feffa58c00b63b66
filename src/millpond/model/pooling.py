"""How a model that is made for embeddings makes one of its hidden states."""

from __future__ import annotations

from typing import Any

from millpond.errors import ModelFileError, shown
from millpond.load.gguf import GGUFFile
from millpond.load.safetensors import MAX_CONFIG_BYTES, read_json
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
LAST = "last"


def read_pooling(file: ModelFile) -> str | None:
    """What a model file, or 1_Pooling/config.json beside it, says; None of a model that is not made for embeddings.

    Only "last" is supported: the last token's hidden state. ModelFileError for what is no pooling.
    """
    if isinstance(file, GGUFFile):
        key = f"{file.metadata.get('general.architecture')}.pooling_type"
        number = file.metadata.get(key, 0)
        if not isinstance(number, int) or not 0 <= number < len(KINDS):
            raise ModelFileError(f"{file.path.name}: {key} is {number!r}, not a number from 0 to {len(KINDS) - 1}")
        return KINDS[number] if number else None
    path = file.path.parent / FOLDER / SETTINGS
    return _of_settings(read_json(path, MAX_CONFIG_BYTES, f"{FOLDER}/{SETTINGS}")) if path.exists() else None


def _of_settings(settings: dict[str, Any]) -> str:
    mode = settings.get("pooling_mode")
    if mode is not None:
        return LAST if mode == "lasttoken" else str(mode)
    for name in SWITCHES:
        if not isinstance(settings.get(name, False), bool):
            raise ModelFileError(f"{FOLDER}/{SETTINGS}: {name} must be true or false, got {shown(settings[name])}")
    chosen = [kind for name, kind in SWITCHES.items() if settings.get(name)]
    if not chosen:
        raise ModelFileError(f"{FOLDER}/{SETTINGS} chooses none of {', '.join(SWITCHES)}")
    return " + ".join(chosen)
