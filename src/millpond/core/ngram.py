"""Prompt lookup: a sequence that repeats a run of tokens may well go on as it did the last time."""

from __future__ import annotations

from collections.abc import Iterable

RUN_LENGTHS = (4, 3, 2)  # the longest first: it is the best witness


class NgramIndex:
    """One sequence and where each of its short runs was last followed by a token; O(1) for each token and look-up."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._position_behind: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add the sequence's next tokens."""
        for token_id in token_ids:
            # The runs that end before this token have a token behind them now, and can be found.
            end = len(self._token_ids)
            for length in RUN_LENGTHS:
                if length <= end:
                    self._position_behind[tuple(self._token_ids[end - length :])] = end
            self._token_ids.append(token_id)

    def find(self) -> tuple[int, int] | None:
        """The longest run that ends the sequence and was in it before: its length, and the position behind it there."""
        for length in RUN_LENGTHS:
            start = self._position_behind.get(tuple(self._token_ids[-length:]))
            if start is not None:
                return length, start
        return None

    def continuation(self, start: int, num_tokens: int) -> tuple[int, ...]:
        """num_tokens tokens from position start on; at its end the sequence is taken to repeat itself from there."""
        period = len(self._token_ids) - start
        return tuple(self._token_ids[start + i % period] for i in range(num_tokens))
