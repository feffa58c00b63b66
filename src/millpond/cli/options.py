"""Arguments that several commands share, named as vLLM names them, with the defaults of EngineConfig."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.config import AUTO, DTYPES, KV_DTYPES, POLICIES, QUANTIZE, SPECULATIVE, EngineConfig

DEFAULT_MODEL = "smollm2"
PICTURES = (".png", ".svg", ".pdf")
DEFAULTS = EngineConfig()

# Bounds of what is simulated or counted without a model, where no memory of a machine sets one.
MOST_COUNT = 1 << 20  # of slots, of tokens in a block or a step
MOST_BLOCKS = 1 << 22

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
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


def parse_watermark(given: str | float) -> float | str:
    """A share of the pool, or "auto"; EngineConfig says which shares there are."""
    if isinstance(given, float) or given.strip() == AUTO:  # a float is the default
        return AUTO if isinstance(given, str) else given
    try:
        return float(given)
    except ValueError:
        raise typer.BadParameter(f"{given[:40]!r} is neither a share such as 0.01 nor {AUTO}") from None


def parse_folder(text: str) -> Path:
    """A folder's path, which is not empty: that would be whatever folder one is in."""
    if not str(text).strip():
        raise typer.BadParameter("the name of the folder is empty: name one, or leave the option out")
    return Path(text)


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


def parse_counts(text: str, option: str, *, least: int = 1, most: int = MOST_COUNT) -> tuple[int, ...]:
    """Whole numbers from least to most from "1,4,16"; "" is none of them. An error names the option."""
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text[:40]!r} is not a list of numbers (say 1,4,16)", param_hint=f"'{option}'"
        ) from None
    for count in counts:
        if not least <= count <= most:
            side = f"below {least}" if count < least else f"above {most}"
            raise typer.BadParameter(f"{text[:40]!r} holds a number {side}", param_hint=f"'{option}'")
    return counts


def check_target(path: Path | None) -> Path | None:
    """A callback of an option that names a file to write: refused before minutes of work, not after."""
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder} to write {path.name} into")
    if path.exists() and not path.is_file():
        raise typer.BadParameter(f"{path} is there and is not a file: name another one")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written for want of permission: name another place")
    return path


def check_plot(path: Path | None) -> Path | None:
    """The same for a picture, which takes matplotlib and one of its formats."""
    if path is None:
        return None
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("a picture needs matplotlib; install it with: pip install 'millpond[plot]'")
    if path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"a picture is one of {', '.join(PICTURES)}, got {path.name!r}")
    return check_target(path)


def parse_weights(given: Sequence[str] | None) -> tuple[tuple[str, float], ...]:
    """("key1=2", "user:ann=0.5") as pairs of tenant and weight, whose bounds are the config's to check."""
    weights: dict[str, float] = {}
    for text in given or ():
        tenant, is_pair, number = text.rpartition("=")
        if tenant in weights:
            raise typer.BadParameter(f"{tenant[:40]!r} has two weights: give it one", param_hint="'--tenant-weight'")
        try:
            weights[tenant] = float(number if is_pair else "")
        except ValueError:
            raise typer.BadParameter(
                f"{text[:40]!r} is not a tenant and its weight (say key1=2)", param_hint="'--tenant-weight'"
            ) from None
    return tuple(weights.items())


ModelArgument = Annotated[
    str, typer.Argument(metavar="[MODEL]", help="A known name, a GGUF file, a folder, or org/repo[:file].")
]
ModelOption = Annotated[str, typer.Option("--model", help="A known name, a GGUF file, a folder, or org/repo[:file].")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE|TEXT",
        help="A Jinja template, or its file, in place of the model's own [default: the model's]",
    ),
]
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
Quantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        metavar="|".join(QUANTIZE),
        help="Pack a checkpoint that is not quantised in 8 bits, or its layers in 4, as it is loaded.",
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
ItlTarget = Annotated[
    float | None,
    typer.Option(
        "--itl-target",
        metavar="MS",
        help="Milliseconds between two tokens to keep to, by computing prompts in smaller parts [default: no target]",
    ),
]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens in a block of the K/V pool, a multiple of 16.")]
Watermark = Annotated[
    Any,
    typer.Option(
        "--watermark",
        parser=parse_watermark,
        metavar="SHARE|auto",
        help="Share of the pool held back from newcomers; auto: as much as running requests are likely to need.",
    ),
]
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
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Keep the K/V of prompts and answers while there is room, for requests that begin alike.",
    ),
]
PrefixDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        parser=parse_folder,
        metavar="DIR",
        help="Keep that K/V in a folder too, across restarts [default: in memory alone]",
    ),
]
PrefixDirSize = Annotated[
    int | None,
    typer.Option(
        "--cache-dir-size", parser=parse_memory, metavar="SIZE", help="Most that the folder may hold [default: 4G]"
    ),
]
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
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="|".join(POLICIES),
        help="Who goes first: who came first, the smaller `priority`, or each tenant in turn; no answer changes.",
    ),
]
TenantWeights = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant-weight",
        metavar="TENANT=W",
        help="Tokens that a tenant has for each one of the others', with --policy fair; can be repeated [default: 1]",
    ),
]
Slots = Annotated[int, typer.Option("--slots", min=1, max=MOST_COUNT, help="How many requests run at once.")]
Blocks = Annotated[int, typer.Option("--blocks", min=1, max=MOST_BLOCKS, help="Blocks of the K/V pool.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", callback=check_plot, help="Write a picture too (PNG, SVG or PDF)."),
]
