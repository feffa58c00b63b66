"""What a request changes about which tokens it may get, before temperature and everything after it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Applied to a row's raw logits in this order: only the allowed ids are left (None: all), those in banned_runs and
    the ends go, the biases are added.

    A run of banned_runs bans its last token where the output ends with the tokens before that; a run of one always.
    end_token_ids are banned while there are fewer than min_tokens output tokens.
    """

    allowed: tuple[int, ...] | None = None
    banned_runs: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    biases: tuple[tuple[int, float], ...] = ()
