"""How well transformers predicts `sherlock.txt` with a named model's own weights, window by window."""

from __future__ import annotations

import json

from millpond.lab.evaluation import WindowPlan, text_tokens
from millpond.text.tokenizer import Tokenizer
from reference.golden import FOLDER

TEXT_FILE = FOLDER / "sherlock.txt"
SCORES_FILE = FOLDER / "sherlock_scores.json"
PLAN = WindowPlan(context=512)


def load_scores() -> dict[str, list[float]]:
    """For each model by name, the mean log-probability of each window's tokens that count, in float32."""
    return json.loads(SCORES_FILE.read_text(encoding="utf-8"))


def windows_of(tokenizer: Tokenizer) -> list[list[int]]:
    """The text's windows, each from its beginning as score_windows has it."""
    begin = tokenizer.source.begin
    windows = PLAN.cut(text_tokens(tokenizer, TEXT_FILE.read_text(encoding="utf-8")))
    return [[*begin, *window[len(begin) :]] for window in windows]


def score_of(model, window: list[int]) -> float:
    """What a model of transformers says of one window: the mean log-probability of the tokens that count."""
    import torch

    first = PLAN.counted.start
    with torch.inference_mode():
        kept = model(torch.tensor([window]), use_cache=False, logits_to_keep=len(window) - first + 1).logits[0, :-1]
        return -torch.nn.functional.cross_entropy(kept.double(), torch.tensor(window[first:])).item()
