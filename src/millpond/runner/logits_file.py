"""Log probabilities of a model over a text, in the file that llama.cpp's perplexity tool writes and reads.

    "_logits_" | int32 context, vocab, windows | int32 tokens [windows, context] | uint16 [windows, counted, 4 + vocab]

There is a row for each position from the middle of a window to the last but one. It begins with two float32, the
step and the lowest log probability; what follows are steps above that, of which one is 2.4e-4 at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ModelFileError

MAGIC = b"_logits_"
HEAD_BYTES = len(MAGIC) + 12
DEPTH = 16.0  # logits further below a row's largest are written as if they were just so far below it
STEPS = 65535
MOST_STEP = 1.001 * DEPTH / STEPS
SLACK = 0.01  # of a row's sum of probabilities; that of what is cut off at DEPTH comes on top
FIGURES = 4  # 16-bit words before a row's log probabilities


def counted(context: int) -> range:
    """The positions of a window that count: each predicts a token of the window's second half."""
    return range(context // 2, context - 1)


def row_words(vocab: int) -> int:
    """The 16-bit words of a row."""
    return FIGURES + vocab + vocab % 2


def file_bytes(context: int, vocab: int, windows: int) -> int:
    return HEAD_BYTES + windows * (4 * context + 2 * len(counted(context)) * row_words(vocab))


def encode_row(logits: NDArray[np.float32]) -> NDArray[np.uint16]:
    """One position's logits [vocab] as a row."""
    largest = logits.max()
    lowest = max(logits.min(), largest - np.float32(DEPTH))
    log_sum = np.log(np.exp(logits - largest).sum(dtype=np.float64))
    step = np.float32(largest - lowest) / np.float32(STEPS)
    row = np.zeros(row_words(logits.size), np.uint16)
    row[:FIGURES] = np.array([step, lowest - largest - log_sum], np.float32).view(np.uint16)
    if step > 0:
        row[FIGURES : FIGURES + logits.size] = np.rint(np.maximum(logits - lowest, 0) / step).astype(np.uint16)
    return row


def decode_row(row: NDArray[np.uint16], vocab: int) -> NDArray[np.float32]:
    """The log probabilities [vocab] that a row stands for."""
    step, lowest = row[:FIGURES].view(np.float32)
    logprobs: NDArray[np.float32] = step * row[FIGURES : FIGURES + vocab].astype(np.float32) + lowest
    return logprobs


@dataclass(frozen=True, slots=True)
class LogitsFile:
    """tokens are int32 [windows, context], rows uint16 [windows, counted positions, words], mapped from the file."""

    path: Path
    vocab: int
    tokens: NDArray[np.int32]
    rows: NDArray[np.uint16]

    @property
    def context(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def windows(self) -> list[list[int]]:
        listed: list[list[int]] = self.tokens.tolist()
        return listed

    def put(self, window: int, position: int, logits: NDArray[np.float32]) -> None:
        """Write the logits [rows, vocab] of positions of a window, those that count."""
        positions = counted(self.context)
        for index, row in enumerate(logits, position):
            if index in positions:
                self.rows[window, index - positions.start] = encode_row(row)

    def check(self, window: int) -> None:
        """Raise ModelFileError for a row of a window that no model has written: it is then no distribution."""
        for index, row in enumerate(self.rows[window]):
            step, lowest = row[:FIGURES].view(np.float32).tolist()
            if not (0 <= step <= MOST_STEP and -math.inf < lowest <= 0):
                what = f"its step is {step:g} (0 to {MOST_STEP:.2g} can be) and its lowest log probability {lowest:g}"
                raise self._damaged(window, index, what)
            total = float(np.exp(decode_row(row, self.vocab)).sum(dtype=np.float64))
            if not 1 - SLACK <= total <= 1 + SLACK + self.vocab * math.exp(-DEPTH):
                raise self._damaged(window, index, f"its probabilities sum to {total:g}, not to 1")

    def _damaged(self, window: int, index: int, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path.name}: row {index} of window {window} is damaged: {what}; have the file written again"
        )

    def flush(self) -> None:
        """What was put is in the file."""
        if isinstance(self.rows, np.memmap):
            self.rows.flush()


def create_logits_file(path: Path, windows: Sequence[Sequence[int]], vocab: int) -> LogitsFile:
    """A file for windows of one length, to be filled with `put`."""
    tokens = np.array(windows, np.int32)
    count, context = tokens.shape
    with path.open("wb") as file:
        file.write(MAGIC + np.array([context, vocab, count], np.int32).tobytes() + tokens.tobytes())
        file.truncate(file_bytes(context, vocab, count))
    return LogitsFile(path, vocab, tokens, _map_rows(path, "r+", context, vocab, count))


def open_logits_file(path: Path) -> LogitsFile:
    """Raises ModelFileError for what is no such file, or not all of one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES or head[: len(MAGIC)] != MAGIC:
            raise ModelFileError(f"{path.name} is no file of saved log probabilities: it does not begin with _logits_")
        context, vocab, count = np.frombuffer(head[len(MAGIC) :], np.int32).tolist()
        if context < 3 or vocab < 1 or count < 1:
            raise ModelFileError(f"{path.name} says that it holds {count} windows of {context} tokens of {vocab}")
        if size != (expected := file_bytes(context, vocab, count)):
            raise ModelFileError(
                f"{path.name} has {size} bytes, but {count} windows of {context} tokens of {vocab} take {expected}"
            )
        tokens = np.frombuffer(file.read(4 * context * count), np.int32).reshape(count, context)
    return LogitsFile(path, vocab, tokens, _map_rows(path, "r", context, vocab, count))


def _map_rows(path: Path, mode: Any, context: int, vocab: int, count: int) -> NDArray[np.uint16]:
    shape = count, len(counted(context)), row_words(vocab)
    return np.memmap(path, np.uint16, mode, HEAD_BYTES + 4 * context * count, shape)
