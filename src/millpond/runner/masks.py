"""A slot's mask over its rows of logits, and what of its output the mask must know."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.core.masks import TokenMask

BANNED = np.float32(-np.inf)


class SlotMask:
    """One request's mask. It follows the output, for a run of tokens is banned by the tokens before its last."""

    def __init__(self, mask: TokenMask, output_token_ids: Sequence[int]) -> None:
        self._allowed = None if mask.allowed is None else np.unique(np.array(mask.allowed, np.int64))
        self._banned = np.array([run[0] for run in mask.banned_runs if len(run) == 1], np.int64)
        self._runs = [run for run in mask.banned_runs if len(run) > 1]
        self._min_tokens = mask.min_tokens
        self._ends = np.array(mask.end_token_ids, np.int64)
        self._bias_ids = np.array([token_id for token_id, _ in mask.biases], np.int64)
        self._biases = np.array([bias for _, bias in mask.biases], np.float32)
        self._output = list(output_token_ids) if self._runs else []

    def follow(self, token_ids: Sequence[int]) -> None:
        """The output has grown by these tokens."""
        if self._runs:
            self._output += token_ids

    def edit(self, row: NDArray[np.float32], output_position: int, guesses: Sequence[int]) -> None:
        """Mask one row of logits [vocab], that of an output position behind so many guessed tokens, in place."""
        if self._allowed is not None:
            kept = row[self._allowed]
            row.fill(BANNED)
            row[self._allowed] = kept
        row[self._banned] = BANNED
        if output_position < self._min_tokens:
            row[self._ends] = BANNED
        for *before, last in self._runs:
            # The last tokens of the output with the guesses behind it.
            behind = guesses[-len(before) :]
            known = self._output[max(0, len(self._output) - len(before) + len(behind)) :]
            if [*known, *behind] == before:
                row[last] = BANNED
        row[self._bias_ids] += self._biases
