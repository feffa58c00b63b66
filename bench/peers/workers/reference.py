"""Log-probabilities of the float32 reference over a text in chunks. Runs in the reference environment.

python -m bench.peers.workers.reference MODEL TOKENS.npy FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from millpond.runner.logits_file import counted, create_logits_file
from reference.transformers_llama import load_reference, logits_of


def main(model: Path, tokens_file: Path, folder: Path) -> None:
    """Write base.bin, which llama.cpp's perplexity tool and `millpond eval kl` read."""
    tokens = np.load(tokens_file)  # [chunks, length]
    reference = load_reference(model, torch.float32)
    first = counted(tokens.shape[1]).start
    part = folder / "base.part"
    file = create_logits_file(part, tokens.tolist(), reference.config.vocab_size)
    for window, chunk in enumerate(tokens):
        file.put(window, first, logits_of(reference, chunk.tolist())[first:-1])
    file.flush()
    part.rename(folder / "base.bin")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
