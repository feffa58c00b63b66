"""Token scores as the answers of the API show them.

They are those of the raw logits, before masks, penalties and temperature. A token of whole characters is named by its
text, any other by its bytes, `bytes:\\xe2\\x82`, so that no two tokens have one name by being cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from millpond.core.step import TokenScore
from millpond.text.detokenizer import Detokenizer
from millpond.text.tokenizer import Tokenizer


class TokenNames:
    """How tokens are shown. Special tokens that the text leaves out have a name and no bytes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()

    def text(self, token_id: int) -> str:
        whole = self.tokenizer.whole_text(token_id)
        if whole is not None:
            return whole
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.tokenizer.token_bytes(token_id))

    def bytes(self, token_id: int) -> list[int] | None:
        """What the token adds to the text; those of an answer's tokens join to it."""
        return None if token_id in self._hidden else list(self.tokenizer.token_bytes(token_id))


def chat_logprobs(names: TokenNames, scores: Iterable[TokenScore]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token_id), "logprob": logprob, "bytes": names.bytes(token_id)}

    content = [
        {**entry(each.token_id, each.logprob), "top_logprobs": [entry(*other) for other in each.top]} for each in scores
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The logprobs objects of one choice, whose text offsets go on from one piece of it to the next."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0
        self._strips_space = False
        self._detokenizer = self._new_detokenizer()

    def _new_detokenizer(self) -> Detokenizer:
        return Detokenizer(self._names.tokenizer, skip_special_tokens=self._names.skip_special_tokens)

    def prompt(self, token_ids: Sequence[int], scores: Iterable[TokenScore], num_top: int) -> dict[str, Any]:
        """Of an echoed prompt; its first token follows nothing and has no log probability."""
        self._strips_space = self._names.tokenizer.source.strips_space  # as the echo does, and no output
        shown: dict[str, Any] = {
            "tokens": [self._names.text(token_ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(token_ids[0])],
        }
        rest = self.output([each._replace(top=each.top[:num_top]) for each in scores])
        # The output is decoded by itself, so half a character at the prompt's end stays half of one.
        self._offset += len(self._detokenizer.finish())
        self._detokenizer = self._new_detokenizer()
        self._strips_space = False
        return joined(shown, rest)

    def output(self, scores: Iterable[TokenScore]) -> dict[str, Any]:
        """Of the next tokens. Of two with one name the likelier is told."""
        scores, text = list(scores), self._names.text
        return {
            "tokens": [text(each.token_id) for each in scores],
            "token_logprobs": [each.logprob for each in scores],
            "top_logprobs": [self._top(each) for each in scores],
            "text_offset": [self._advance(each.token_id) for each in scores],
        }

    def _top(self, score: TokenScore) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            named.setdefault(self._names.text(token_id), logprob)
        return named

    def _advance(self, token_id: int) -> int:
        """Where the token's text begins."""
        offset = self._offset
        text = self._detokenizer.push_token(token_id)
        if text and self._strips_space:
            text, self._strips_space = text.removeprefix(" "), False
        self._offset += len(text)
        return offset


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One logprobs object of two that follow each other."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(names: TokenNames, scores: Sequence[TokenScore], num_top: int) -> list[dict[str, Any] | None]:
    """The field of vLLM: for each token of the prompt but the first the likeliest ids there and itself."""

    def entries(score: TokenScore) -> dict[str, Any]:
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(score.top[:num_top], 1)}
        ranked.setdefault(score.token_id, (score.logprob, score.rank))
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": names.text(token_id)}
            for token_id, (logprob, rank) in ranked.items()
        }

    return [None, *map(entries, scores)]
