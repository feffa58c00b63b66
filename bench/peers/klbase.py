"""The file of a base model's log-probabilities that llama.cpp's perplexity tool compares a model with.

    "_logits_" | int32 context, vocab, chunks | int32 tokens [chunks, context] | uint16 [chunks, counted, 4 + vocab]

There is a row for each position from the middle of a chunk to the last but one. It begins with two float32, the
step and the lowest log-probability; what follows are steps above that.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DEPTH = 16.0  # logits further below a row's largest are written as if they were just so far below it
STEPS = 65535


def counted(context: int) -> slice:
    """The positions of a chunk that count: each predicts a token of the chunk's second half."""
    return slice(context // 2, context - 1)


def encode_row(logits: NDArray[np.float32]) -> NDArray[np.uint16]:
    """One position's logits [vocab] as 4 + vocab (rounded up to even) 16-bit words."""
    largest = logits.max()
    lowest = max(logits.min(), largest - np.float32(DEPTH))
    log_sum = np.log(np.exp((logits - largest).astype(np.float64)).sum())
    step = np.float32(largest - lowest) / np.float32(STEPS)
    row = np.zeros(4 + logits.size + logits.size % 2, np.uint16)
    row[:4] = np.array([step, lowest - largest - log_sum], np.float32).view(np.uint16)
    if step > 0:
        row[4 : 4 + logits.size] = np.rint(np.maximum(logits - lowest, 0) / step).astype(np.uint16)
    return row


def decode_row(row: NDArray[np.uint16], vocab: int) -> NDArray[np.float64]:
    """The log-probabilities [vocab] that a row stands for."""
    step, lowest = row[:4].view(np.float32).astype(np.float64)
    return step * row[4 : 4 + vocab] + lowest


def write_base(path: Path, tokens: NDArray[np.integer], logits: NDArray[np.float32]) -> None:
    """tokens are [chunks, context], logits [chunks, counted positions, vocab]."""
    chunks, context = tokens.shape
    with path.open("wb") as base:
        base.write(b"_logits_")
        base.write(np.array([context, logits.shape[2], chunks], np.int32).tobytes())
        base.write(tokens.astype(np.int32).tobytes())
        for chunk in logits:
            for row in chunk:
                base.write(encode_row(row).tobytes())
