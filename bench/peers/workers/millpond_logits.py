"""millpond's logits over a text in chunks, for the comparison of quality. Runs in millpond's own environment.

python -m bench.peers.workers.millpond_logits MODEL TOKENS.npy LOGITS.npy THREADS
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from millpond.build import build_model_runner
from millpond.config import EngineConfig


def main(model: Path, tokens_file: Path, logits_file: Path, threads: int) -> None:
    """Write float32 [chunks, counted, vocab]: of each chunk the positions from the middle to the last but one."""
    tokens = np.load(tokens_file)
    runner = build_model_runner(model, EngineConfig(max_model_len=tokens.shape[1], threads=threads))
    first = tokens.shape[1] // 2
    np.save(logits_file, np.stack([runner.logits(chunk.tolist())[first:-1] for chunk in tokens]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
