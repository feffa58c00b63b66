"""A GGUF file from the Hugging Face hub, kept in the hub client's own cache, which other programs share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millpond.errors import DownloadError, ModelNotFoundError
from millpond.load.parts import part_names
from millpond.load.progress import Progress

_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_.+-]*[A-Za-z0-9_+-])?"
REPOSITORY = re.compile(rf"({_WORD}/{_WORD})(?::((?:{_WORD}/)*{_WORD}\.gguf))?", re.ASCII)
MAX_NAME = 400


def parse(model: str) -> tuple[str, str | None] | None:
    """`org/repo` and the file of `org/repo:file`, or None where `model` is neither. No part begins or ends with a
    dot, so nothing that this lets through can leave a folder."""
    match = REPOSITORY.fullmatch(model) if len(model) <= MAX_NAME else None
    if match is None or ".." in model or "--" in match[1]:
        return None
    return match[1], match[2]


def find(repository: str, file: str, *, cache_dir: Path | None) -> Path | None:
    """The file in the hub client's cache, without asking the hub; of a split model the first part, if all are there."""
    from huggingface_hub import try_to_load_from_cache

    paths = (try_to_load_from_cache(repository, name, cache_dir=cache_dir) for name in part_names(file))
    found = [Path(path) if isinstance(path, str) else None for path in paths]
    return None if None in found else found[0]


def fetch(
    repository: str, file: str | None, *, endpoint: str | None, cache_dir: Path | None, progress: Progress
) -> Path:
    """The named file of the repository, or its only GGUF file, with all its parts. Nothing is downloaded twice.

    Raises ModelNotFoundError where there is no such repository or file, DownloadError for everything else.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP client it uses

    if file is not None and (cached := find(repository, file, cache_dir=cache_dir)):
        return cached
    try:
        paths = [
            hf_hub_download(
                repository, part, endpoint=endpoint, cache_dir=cache_dir, tqdm_class=_bar_class(progress, part)
            )
            for part in part_names(_choose(repository, file, _list(repository, endpoint)))
        ]
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: the hub's own transfer library
        only = _only_cached(repository, cache_dir) if file is None and _unreachable(error) else None
        if only is None:
            raise _explain(repository, error) from error
        progress(0, None, f"the hub cannot be reached; using {only.name} from its cache")
        return only
    return Path(paths[0])


def _list(repository: str, endpoint: str | None) -> dict[str, int | None]:
    """The repository's GGUF files and their sizes in bytes, where the hub tells them."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=endpoint).model_info(repository, files_metadata=True)
    files = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
    return {name: size for name, size in sorted(files.items()) if parse(f"{repository}:{name}")}


def _choose(repository: str, file: str | None, files: Mapping[str, int | None]) -> str:
    whole = [name for name in files if part_names(name)[0] == name]  # not the later parts of split ones
    listing = "\n".join(f"    {repository}:{name}{_in_megabytes(files, part_names(name))}" for name in whole)
    if not files:
        raise ModelNotFoundError(f"{repository} has no GGUF file; look for a repository of the model with GGUF files")
    if file is None and len(whole) > 1:
        raise ModelNotFoundError(f"{repository} has {len(whole)} GGUF files; name one of them:\n{listing}")
    chosen = file or next(iter(whole or files))
    for part in part_names(chosen):
        if part not in files:
            raise ModelNotFoundError(f"{repository} has no file {part}; its GGUF files are:\n{listing}")
    return chosen


def _in_megabytes(files: Mapping[str, int | None], names: Sequence[str]) -> str:
    sizes = [files.get(name) for name in names]
    return "" if None in sizes else f"  ({sum(map(int, filter(None, sizes))) / 1e6:,.0f} MB)"


def _only_cached(repository: str, cache_dir: Path | None) -> Path | None:
    """The one GGUF file of the repository that was fetched before, if it is one."""
    from huggingface_hub import constants

    folder = Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    newest = folder / "refs" / "main"
    if not newest.is_file():
        return None
    files = sorted((folder / "snapshots" / newest.read_text().strip()).rglob("*.gguf"))
    return files[0] if files and [each.name for each in files] == part_names(files[0].name) else None


def _unreachable(error: Exception) -> bool:
    """Whether the hub did not answer at all, or is in trouble itself."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500


def _explain(repository: str, error: Exception) -> DownloadError | ModelNotFoundError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return DownloadError(f"{repository} is gated: accept its terms on the hub, then log in with `hf auth login`")
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{repository} is not on the hub, or is private; check the spelling, or log in with `hf auth login`"
        )
    about = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__  # without a local path
    reason = about.splitlines()[0]
    return DownloadError(
        f"{repository} could not be fetched from the hub: {reason}; pull again, or give the path of a GGUF file"
    )


def _bar_class(progress: Progress, what: str) -> Any:
    """The hub client's progress bar, drawn nowhere: it only calls `progress`. Counted here, as it may be disabled."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm

    class Bar(base):  # type: ignore[misc]
        monitor_interval = 0  # no thread that looks after the drawing

        def __init__(self, *args: Any, **display: Any) -> None:
            super().__init__(*args, **{**display, "name": None, "disable": False, "file": _Nowhere()})
            self.done_bytes = int(display.get("initial") or 0)
            progress(self.done_bytes, self.total, f"downloading {what}")

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            self.done_bytes += int(n or 0)
            progress(self.done_bytes, self.total, f"downloading {what}")

        def update_transfer(self, n: float) -> None:
            """Having this tells the client to use one bar for the file, not a second one for the network."""

    return Bar


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...
