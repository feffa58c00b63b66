"""Make tests/golden/sherlock_scores.json, with torch and transformers: some minutes for each model.

python -m venv .venv-reference && .venv-reference/bin/pip install -e '.[reference]'
.venv-reference/bin/python scripts/make_sherlock_scores.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from millpond.load.gguf import open_gguf
from millpond.load.store import resolve
from millpond.text.tokenizer import Tokenizer
from reference import sherlock
from reference.transformers_gemma import load_gemma
from reference.transformers_llama import load_reference

LOADERS = {"smollm2": load_reference, "gemma3-270m": load_gemma}


def main() -> None:
    scores = {}
    for name, load in LOADERS.items():
        path = resolve(name)
        model = load(path, torch.float32)
        windows = sherlock.windows_of(Tokenizer.from_gguf(open_gguf(path).metadata))
        scores[name] = [round(sherlock.score_of(model, window), 6) for window in windows]
    sherlock.SCORES_FILE.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
