"""What a step takes, and so how many tokens of prompts it may compute beside requests that are to keep their pace.

A step is taken to cost so much for each of its rows and FIXED_ROWS more, and so much for each token of a prompt. Both
are learned from the steps as they come; what the scheduler gets is a whole number, on which alone its decisions depend.
"""

from __future__ import annotations

from millpond.core.speculation import FIXED_ROWS

FIRST_TOKENS = 16  # before a token of a prompt has a price
LEAST_SHARE = 0.5  # of what decoding takes, where that leaves nothing of the target: prompts come on, too
LEAST_EXTRA = 0.01  # of a step is what its prompts took, where it took no longer than without them
WEIGHT = 0.25  # of the newest step in a price


class StepPrices:
    """What a step takes, learned from what each one took. The engine's thread notes, any thread may ask."""

    def __init__(self) -> None:
        self._row_seconds: float | None = None
        self._token_seconds: float | None = None

    def prefill_budget(self, num_decoding: int, target_seconds: float) -> int | None:
        """The most tokens of prompts beside num_decoding requests that keep a step within so many seconds.

        At least 1; None, no bound, where nobody decodes.
        """
        if num_decoding == 0:
            return None
        if self._token_seconds is None:
            return FIRST_TOKENS
        decode = self.decode_seconds(num_decoding)
        spare = max(target_seconds - decode, LEAST_SHARE * decode)
        return max(1, int(spare / self._token_seconds))

    @property
    def token_seconds(self) -> float:
        """What a token of a prompt adds to a step; 0 before one was measured."""
        return self._token_seconds or 0.0

    def note(self, num_rows: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step of num_rows decoding rows and so many tokens of prompts took so long."""
        if num_prefill_tokens == 0:
            if num_rows:
                self._row_seconds = _blend(self._row_seconds, seconds / (num_rows + FIXED_ROWS))
            return
        extra = seconds - (self.decode_seconds(num_rows) if num_rows else 0.0)
        self._token_seconds = _blend(self._token_seconds, max(extra, LEAST_EXTRA * seconds) / num_prefill_tokens)

    def decode_seconds(self, num_rows: int) -> float:
        """What a step of so many rows takes; 0 before one was measured."""
        return (self._row_seconds or 0.0) * (num_rows + FIXED_ROWS)


def _blend(price: float | None, newest: float) -> float:
    return newest if price is None else price + WEIGHT * (newest - price)
