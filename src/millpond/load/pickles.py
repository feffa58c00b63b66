"""Weights that were pickled: such a file runs code of whoever made it when it is opened, so none ever is."""

from __future__ import annotations

from pathlib import Path

from millpond.errors import ModelFileError

SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # torch's archives, and bare pickles


def refuse_pickle(path: Path) -> None:
    """Raise ModelFileError for a file that is pickled by its first bytes, or a folder with nothing but such files."""
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.is_file())
        pickled = [each for each in files if each.suffix.lower() in SUFFIXES]
        if pickled and not any(each.suffix.lower() in (".safetensors", ".gguf") for each in files):
            raise _refusal(f"{path.name}: its weights, such as {pickled[0].name}, are pickle files")
    elif path.is_file():
        with path.open("rb") as file:
            first = file.read(8)
        # Of safetensors the first bytes are the header's length, which may look like a pickle's where it fits the file.
        is_length = path.suffix == ".safetensors" and int.from_bytes(first, "little") < path.stat().st_size
        if first.startswith(MAGICS) and not is_length:
            raise _refusal(
                f"{path.name}: this is a pickle file, or an archive of some, by its first bytes {first[:4]!r}"
            )


def _refusal(what: str) -> ModelFileError:
    return ModelFileError(
        f"{what}, which run code of whoever made them when they are opened, and are never opened here; take the model "
        "as safetensors or GGUF, or convert it where you trust it"
    )
