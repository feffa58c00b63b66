"""How fast the queue drains, measured: what Retry-After promises is a guess from it."""

from __future__ import annotations

import math
from collections import deque

WINDOW_SECONDS = 30.0
MOST_SECONDS = 60


class DrainRate:
    """The tokens of prompts and outputs that finished in the last WINDOW_SECONDS of work. Times are given, not read."""

    def __init__(self) -> None:
        self._began = 0.0
        self._finished: deque[tuple[float, int, int]] = deque()
        self._prompt_tokens = self._tokens = 0

    def begin(self, now: float) -> None:
        """Work begins after none: time with nothing to do says nothing of the speed."""
        self._began = now
        self._finished.clear()
        self._prompt_tokens = self._tokens = 0

    def finish(self, now: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        tokens = num_prompt_tokens + num_output_tokens
        self._finished.append((now, num_prompt_tokens, tokens))
        self._prompt_tokens += num_prompt_tokens
        self._tokens += tokens

    def seconds_until(self, now: float, num_requests: int, num_prompt_tokens: int) -> int:
        """Whole seconds, 1 to MOST_SECONDS, until so many more requests and so many prompt tokens will be done.

        They are taken to be like those that finished. Where none has, it takes at least as long as none has.
        """
        seconds = self.seconds_measured(now, num_requests, num_prompt_tokens)
        if seconds is None:
            seconds = min(now - self._began, WINDOW_SECONDS)
        return max(1, min(MOST_SECONDS, math.ceil(seconds)))

    def seconds_measured(self, now: float, num_requests: int, num_prompt_tokens: int) -> float | None:
        """The same with no bounds; None where none has finished."""
        self._forget(now - WINDOW_SECONDS)
        if not self._finished:
            return None
        tokens_of_requests = num_requests * self._tokens / len(self._finished)
        tokens_of_prompts = num_prompt_tokens * self._tokens / max(1, self._prompt_tokens)
        elapsed = min(now - self._began, WINDOW_SECONDS)
        return max(tokens_of_requests, tokens_of_prompts) * elapsed / self._tokens

    @property
    def mean_output_tokens(self) -> float:
        """Of the answers that finished; 0 where none has."""
        return (self._tokens - self._prompt_tokens) / len(self._finished) if self._finished else 0.0

    def _forget(self, before: float) -> None:
        while self._finished and self._finished[0][0] <= before:
            _, num_prompt_tokens, tokens = self._finished.popleft()
            self._prompt_tokens -= num_prompt_tokens
            self._tokens -= tokens
