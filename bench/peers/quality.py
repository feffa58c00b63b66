"""Quality beside speed: how far each engine's distributions are from the float32 reference, on the same tokens.

The reference is transformers in float32 on the dequantised weights of the one file. llama.cpp is measured by its own
perplexity tool against the reference's log-probabilities, millpond by its logits at the same positions.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.peers.engines import llamacpp
from bench.peers.environments import REFERENCE, run_logged
from bench.peers.klbase import counted
from bench.peers.processes import EngineFailure
from bench.peers.sessions import Sample
from bench.peers.site import ROOT, Site
from bench.peers.store import RunStore
from millpond.load.gguf import open_gguf
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


def compare(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> Sample:
    """Mean and 99th percentile of KL(reference || logits) in nats, and the share of positions with the same top token.

    Both are [..., vocab].
    """
    if reference.shape != logits.shape:
        raise ValueError(f"the reference is {reference.shape}, the logits are {logits.shape}")
    vocab = reference.shape[-1]
    divergences, same = [], []
    for ours, theirs in zip(logits.reshape(-1, vocab), reference.reshape(-1, vocab), strict=True):
        base, other = log_softmax(theirs), log_softmax(ours)
        divergences.append(float((np.exp(base) * (base - other)).sum()))
        same.append(bool(theirs.argmax() == ours.argmax()))
    return {
        "kl_mean": float(np.mean(divergences)),
        "kl_p99": float(np.percentile(divergences, 99)),
        "top1": float(np.mean(same)),
        "positions": len(same),
    }


def log_softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


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
    """The folder with the reference's logits, made once for a model. Raises EngineFailure."""
    folder = site.work / "quality"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "base.bin").exists():
        np.save(folder / "tokens.npy", text_chunks(site))
        command = [site.python(REFERENCE), "-m", "bench.peers.workers.reference"]
        command += [str(site.model), str(folder / "tokens.npy"), str(folder)]
        run_logged(REFERENCE, command, site.log("quality"), {"PYTHONPATH": str(ROOT / "tests")})
    return folder


def of_millpond(site: Site, folder: Path) -> Sample:
    logits_file = folder / "millpond.npy"
    command = [site.python("millpond"), "-m", "bench.peers.workers.millpond_logits"]
    command += [str(site.model), str(folder / "tokens.npy"), str(logits_file), str(len(site.cores))]
    run_logged("millpond", command, site.log("quality"))
    sample = compare(np.load(folder / "reference.npy"), np.load(logits_file))
    logits_file.unlink()
    return sample


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
    return sample | {"positions": len(chunks) * len(range(CONTEXT)[counted(CONTEXT)])}


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
