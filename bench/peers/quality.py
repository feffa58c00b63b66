"""Quality beside speed: how far each engine's distributions are from the float32 reference, on the same tokens.

The reference is transformers in float32 on the dequantised weights of the one file. Its log-probabilities are in one
file, against which llama.cpp is measured by its own perplexity tool and millpond by `millpond eval kl`.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.peers.engines import llamacpp
from bench.peers.environments import REFERENCE, run_logged
from bench.peers.processes import EngineFailure
from bench.peers.sessions import Sample
from bench.peers.site import ROOT, Site
from bench.peers.store import RunStore
from millpond.load.gguf import open_gguf
from millpond.runner.logits_file import counted
from millpond.text.tokenizer import Tokenizer

TEXT = ROOT / "tests" / "golden" / "text.txt"
CONTEXT = 500  # tokens of a chunk
TOOL_SECONDS = 600.0
FILES = {"Q4_0": "q4_0", "Q8_0": "q8_0", "Q4_1": "q4_1"}  # by the name in the table: a variant of llama.cpp
FIGURES = {
    "kl_mean": r"Mean\s+KLD:\s+([-\d.]+)",
    "kl_p99": r"99\.0%\s+KLD:\s+([-\d.]+)",
    "top1": r"Same top p:\s+([\d.]+)",
}


def parse_perplexity(output: str) -> Sample:
    """The figures of llama.cpp's perplexity tool. Raises ValueError, naming the figure, where one is missing."""
    sample: Sample = {}
    for name, pattern in FIGURES.items():
        match = re.search(pattern, output)
        if match is None:
            raise ValueError(f"the perplexity tool printed no {name}")
        sample[name] = float(match[1]) / (100 if name == "top1" else 1)
    return sample


def text_chunks(site: Site) -> NDArray[np.int32]:
    """The tokens of the text that the tests use as well, [chunks, CONTEXT]."""
    tokenizer = Tokenizer.from_gguf(open_gguf(site.model).metadata)
    tokens = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8")), np.int32)
    return tokens[: len(tokens) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)


def make_reference(site: Site) -> Path:
    """The folder with the reference's log-probabilities, made once for a model. Raises EngineFailure."""
    folder = site.work / "quality"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "base.bin").exists():
        np.save(folder / "tokens.npy", text_chunks(site))
        command = [site.python(REFERENCE), "-m", "bench.peers.workers.reference"]
        command += [str(site.model), str(folder / "tokens.npy"), str(folder)]
        run_logged(REFERENCE, command, site.log("quality"), {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"})
    return folder


def of_millpond(site: Site, folder: Path) -> Sample:
    """Raises EngineFailure where the command fails."""
    command = [site.python("millpond"), "-m", "millpond.cli", "eval", "kl", "--model", str(site.model), "--json"]
    command += ["--reference", str(folder / "base.bin"), "--threads", str(len(site.cores))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
    if done.returncode:
        raise EngineFailure(f"millpond: eval kl ended with {done.returncode}: {done.stderr[-500:]}")
    return sample_of(json.loads(done.stdout))


def sample_of(measured: dict[str, Any]) -> Sample:
    """What `millpond eval kl` has measured."""
    divergence = measured["kl"]
    return {
        "kl_mean": divergence["mean"],
        "kl_p99": divergence["p99"],
        "top1": measured["same_top"]["mean"],
        "positions": measured["tokens"],
    }


def of_llamacpp(site: Site, folder: Path, variant: str) -> Sample:
    """Raises EngineFailure where the tool does not say."""
    model = llamacpp.model_path(site, llamacpp.VARIANTS[variant])
    command = [str(llamacpp.binary(site, "llama-perplexity")), "-m", str(model), "-t", str(len(site.cores))]
    command += ["-c", str(CONTEXT), "-b", str(CONTEXT), "-ub", str(CONTEXT), "-fa", "on"]
    command += ["--kl-divergence", "--kl-divergence-base", str(folder / "base.bin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
    try:
        sample = parse_perplexity(done.stdout + done.stderr)
    except ValueError as error:
        raise EngineFailure(f"llamacpp:{variant}: {error} (exit {done.returncode}): {done.stderr[-500:]}") from None
    chunks = text_chunks(site)
    return sample | {"positions": len(chunks) * len(counted(CONTEXT))}


def measure_quality(site: Site, store: RunStore, engines: set[str], tell: Callable[[str], None]) -> None:
    """Record millpond beside each of llama.cpp's files. What fails is recorded and told."""
    if all((f"quality/{name}", engine, 1) in store.done() for name in FILES for engine in engines):
        return
    try:
        folder = make_reference(site)
        ours = of_millpond(site, folder) if "millpond" in engines else None
    except EngineFailure as failure:
        tell(f"[red]{failure}")
        store.add({"key": "quality/Q4_0", "contender": "millpond", "round": 1, "error": str(failure)})
        return
    for name, variant in FILES.items():
        line = {"key": f"quality/{name}", "round": 1}
        if ours is not None:
            store.add(line | {"contender": "millpond", "sample": ours})
        if "llamacpp" not in engines:
            continue
        try:
            store.add(line | {"contender": "llamacpp", "sample": of_llamacpp(site, folder, variant)})
        except EngineFailure as failure:
            tell(f"[red]{failure}")
            store.add(line | {"contender": "llamacpp", "error": str(failure)})
    tell("quality: done")
