"""From the words and ids of a request's parameters to the mask that the sampler lays over its logits."""

from __future__ import annotations

from millpond.core.masks import TokenMask
from millpond.core.sampling import SamplingParams
from millpond.text.tokenizer import Tokenizer


def token_mask(sampling: SamplingParams, ends: frozenset[int], tokenizer: Tokenizer) -> TokenMask | None:
    """None for a request that masks nothing, as nearly every one. ends are the tokens that end its answer."""
    masks_ends = bool(sampling.min_tokens and ends)
    if not (masks_ends or sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids is not None):
        return None
    return TokenMask(
        allowed=sampling.allowed_token_ids,
        banned_runs=_runs(sampling.bad_words, tokenizer),
        min_tokens=sampling.min_tokens if masks_ends else 0,
        end_token_ids=tuple(sorted(ends)) if masks_ends else (),
        biases=sampling.biases,
    )


def _runs(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """How the tokenizer writes each word at the begin of a text and behind a space."""
    spellings = dict.fromkeys(spelling for word in words for spelling in (word, f" {word.lstrip(' ')}"))
    runs = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return tuple(dict.fromkeys(run for run in runs if run))
