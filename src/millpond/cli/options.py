"""Arguments that several commands share, named as vLLM names them, with the defaults of EngineConfig."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from millpond.config import DTYPES, KV_DTYPES, SPECULATIVE, EngineConfig
from millpond.lab.lengths import Lengths

DEFAULT_MODEL = "smollm2"
DEFAULTS = EngineConfig()

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_RANGE = re.compile(r"(\d+)\s*-\s*(\d+)")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


def examples(*lines: str) -> str:
    """The end of a help page, kept as it is written (that is what \\b asks for)."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def parse_memory(text: str) -> int:
    """Bytes from "1048576", "512M" or "2G" (powers of 1024)."""
    match = _MEMORY.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an amount of memory (say 512M or 2G)")
    num_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if math.isinf(num_bytes):
        raise typer.BadParameter(f"{text[:20]}... is more memory than there can be")
    return int(num_bytes)


def parse_port(text: str) -> int:
    """A port number; 0 stands for any free one."""
    if not str(text).isdecimal() or not 0 <= int(text) <= 65535:
        raise typer.BadParameter(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def format_memory(num_bytes: int) -> str:
    """Bytes for a person: "512.0 MiB"."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"


def parse_counts(text: str, least: int = 1, option: str | None = None) -> tuple[int, ...]:
    """Whole numbers of at least `least` from "1,4,16"; "" is none of them. An error names the option."""
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers (say 1,4,16)", param_hint=option) from None
    if any(count < least for count in counts):
        raise typer.BadParameter(f"{text!r} holds a number below {least}", param_hint=option)
    return counts


def parse_lengths(given: str | Lengths) -> Lengths:
    """Lengths in tokens: "6" for all, "4,10" in turn, "4-16" drawn evenly from 4 to 16."""
    if isinstance(given, Lengths):  # a default
        return given
    text = given.strip()
    match = _RANGE.fullmatch(text)
    if match is None:
        if not (counts := parse_counts(text)):
            raise typer.BadParameter("no length is given (say 6, or 4,10 in turn, or 4-16 to draw from)")
        return Lengths(counts)
    low, high = int(match[1]), int(match[2])
    if not 1 <= low <= high:
        raise typer.BadParameter(
            f"{text!r} is not a range of lengths: the first must be at least 1, the last no smaller"
        )
    return Lengths(range(low, high + 1), drawn=True)


def check_folder(path: Path | None) -> None:
    """Raises BadParameter where a file could not be written there for want of its folder: not after minutes of work."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent} to write {path.name} into")


ModelArgument = Annotated[
    str, typer.Argument(metavar="[MODEL]", help="A known name, a GGUF file, a folder, or org/repo[:file].")
]
ModelOption = Annotated[str, typer.Option("--model", help="A known name, a GGUF file, a folder, or org/repo[:file].")]
Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="|".join(DTYPES), help="The checkpoint's own types, or float32 for everything."),
]
KVDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        metavar="|".join(KV_DTYPES),
        help="Keys and values as --dtype has them, or in 8 bits: about twice as many tokens in the same memory.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", help="Longest prompt and output together, in tokens [default: the model's]"),
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Slots: how many requests run at once.")]
MaxNumBatchedTokens = Annotated[
    int, typer.Option("--max-num-batched-tokens", help="Most tokens that one step computes.")
]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens in a block of the K/V pool, a multiple of 16.")]
Watermark = Annotated[float, typer.Option("--watermark", help="Share of the pool held back from newcomers.")]
WatermarkBlocks = Annotated[
    int | None, typer.Option("--watermark-blocks", help="That reserve in blocks; wins over --watermark.")
]
KVMemory = Annotated[
    int | None,
    typer.Option(
        "--kv-memory", parser=parse_memory, metavar="SIZE", help="Memory of the K/V pool, such as 512M or 2G."
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads to compute with [default: the usable cores]")]
Isa = Annotated[str, typer.Option("--isa", help="Which kernels: auto, or one that `millpond doctor` lists.")]
Speculative = Annotated[
    str,
    typer.Option(
        "--speculative",
        metavar="|".join(SPECULATIVE),
        help="Guess tokens ahead from a request's own text, where that pays; no answer changes.",
    ),
]
SpeculativeTokens = Annotated[
    int, typer.Option("--speculative-tokens", help="Most guesses that a step tries for one request.")
]
Slots = Annotated[int, typer.Option("--slots", min=1, help="How many requests run at once.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture too (PNG, SVG or PDF).")]
