"""Token ids to text as they come, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from millpond.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing output; constant work per token.

    All deltas and finish() joined are exactly `tokenizer.decode` of all the tokens. A character is given out with
    its last byte, and bytes that cannot become one as U+FFFD. At most three bytes are ever held back, so the text is
    at most three tokens late (special tokens that are skipped carry no text and do not count).
    """

    __slots__ = ("_decoder", "_holds_bytes", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._holds_bytes = False

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete, perhaps none. InvalidRequestError for an id outside the vocabulary."""
        return "".join(map(self.push_token, token_ids))

    def push_token(self, token_id: int) -> str:
        """push for one token."""
        if token_id in self._skipped:
            return ""
        if not self._holds_bytes and (whole := self._tokenizer.whole_text(token_id)) is not None:
            return whole
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._holds_bytes = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        """What is still held back: U+FFFD if the output ends inside a character, otherwise nothing."""
        return self._decoder.decode(b"", final=True)
