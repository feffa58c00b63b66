"""How far a model's distributions are from a reference's saved ones, a position at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millpond.runner.logits_file import DEPTH, LogitsFile, counted, decode_row


@dataclass(slots=True)
class Divergence:
    """Takes the logits of the reference's windows in any order.

    Of every position that counts, [windows, counted]: kl is KL(reference || model) in nats; logprobs and
    reference_logprobs are those of the token that came next; same_top says that both find the same token likeliest.
    What has not come is not a number.
    """

    reference: LogitsFile
    kl: NDArray[np.float64] = field(init=False)
    logprobs: NDArray[np.float64] = field(init=False)
    reference_logprobs: NDArray[np.float64] = field(init=False)
    same_top: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.reference.rows.shape[:2]
        self.kl, self.logprobs, self.reference_logprobs = (np.full(shape, np.nan) for _ in range(3))
        self.same_top = np.zeros(shape, np.bool_)

    def put(self, window: int, position: int, logits: NDArray[np.float32]) -> None:
        """Compare the logits [rows, vocab] of positions of a window, those that count."""
        positions = counted(self.reference.context)
        for index, row in enumerate(logits, position):
            if index not in positions:
                continue
            place, token = (window, index - positions.start), self.reference.tokens[window, index + 1]
            base = decode_row(self.reference.rows[place], self.reference.vocab)
            logprobs = log_softmax(row)
            self.kl[place] = kl_divergence(base, logprobs)
            self.logprobs[place], self.reference_logprobs[place] = logprobs[token], base[token]
            self.same_top[place] = base.argmax() == logprobs.argmax()


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max()
    logprobs: NDArray[np.float32] = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return logprobs


def kl_divergence(base: NDArray[np.float32], logprobs: NDArray[np.float32]) -> float:
    """KL(base || logprobs) in nats. As in llama.cpp, what the base finds less likely than e^-16 does not count: there
    its file holds no more than that."""
    likely = base > -DEPTH
    base = base[likely]
    return float((np.exp(base) * (base - logprobs[likely])).sum(dtype=np.float64))
