"""Logits of the float32 reference over a text in chunks. Runs in the reference environment.

python -m bench.peers.workers.reference MODEL TOKENS.npy FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from bench.peers.klbase import write_base
from reference.transformers_llama import load_reference, logits_of


def main(model: Path, tokens_file: Path, folder: Path) -> None:
    """Write reference.npy, float32 [chunks, counted, vocab], and base.bin, the same for llama.cpp's perplexity tool."""
    tokens = np.load(tokens_file)  # [chunks, length]
    reference = load_reference(model, torch.float32)
    first = tokens.shape[1] // 2
    logits = np.stack([logits_of(reference, chunk.tolist())[first:-1] for chunk in tokens])
    np.save(folder / "reference.npy", logits)
    write_base(folder / "base.part", tokens, logits)
    (folder / "base.part").rename(folder / "base.bin")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
