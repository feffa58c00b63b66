"""Encoding a text in which some special tokens are only spelled: they become what their characters are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

from millpond.errors import InvalidRequestError
from millpond.text.library import faults_as
from millpond.text.marks import RenderedChat


def encoded(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Without special tokens around it. Other Python threads run meanwhile. InvalidRequestError where the library
    fails at the text."""
    # The batch call, even for one text: it lets go of the interpreter lock, and encode() does not.
    with faults_as(lambda message: InvalidRequestError(f"the model's tokenizer cannot encode this text: {message}")):
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class SpokenText:
    """The parts between true special tokens go through a second backend that knows none of these.

    special_texts matches any special token, the longest one first; it is None where there are none. Both backends share
    the vocabulary, so the second takes no room.
    """

    __slots__ = ("_first", "_later", "_tokens", "special_texts")

    def __init__(self, backend: tokenizers.Tokenizer, special: frozenset[int]) -> None:
        added = sorted(backend.get_added_tokens_decoder().items())
        self._tokens = {token.content: (token_id, token) for token_id, token in added if token_id in special}
        self.special_texts = any_of(self._tokens) if self._tokens else None
        others = [token for token_id, token in added if token_id not in special]
        self._first = _sharing(backend, others, backend.pre_tokenizer)
        self._later = _sharing(backend, others, _without_first_space(backend.pre_tokenizer))

    def encode(self, text: RenderedChat) -> list[int]:
        ids: list[int] = []
        place = 0
        for first, last, token_id in self._true_tokens(text):
            ids += self._plain(text[place:first], place)
            ids.append(token_id)
            place = last
        return ids + self._plain(text[place:], place)

    def _plain(self, text: str, place: int) -> list[int]:
        return encoded(self._later if place else self._first, text) if text else []

    def _true_tokens(self, text: RenderedChat) -> Iterator[tuple[int, int, int]]:
        """Where each begins and ends, with the whitespace that belongs to it, as the backend finds them."""
        assert self.special_texts is not None
        begin = 0
        for limit, after in (*text.spoken, (len(text), len(text))):
            for match in self.special_texts.finditer(text, begin, limit):
                token_id, token = self._tokens[match[0]]
                first, last = match.span()
                if token.single_word and (text[first - 1 : first].isalnum() or text[last : last + 1].isalnum()):
                    continue
                while token.lstrip and first > begin and text[first - 1].isspace():
                    first -= 1
                while token.rstrip and last < limit and text[last].isspace():
                    last += 1
                yield first, last, token_id
                begin = last
            begin = after


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the texts, the longest first. Common beginnings are looked at once: some models
    have thousands of tokens that begin alike."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_pattern(root))


def _pattern(node: dict[str, Any]) -> str:
    branches = [re.escape(character) + _pattern(child) for character, child in node.items() if character]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def _sharing(
    backend: tokenizers.Tokenizer,
    added: list[tokenizers.AddedToken],
    words: tokenizers.pre_tokenizers.PreTokenizer | None,
) -> tokenizers.Tokenizer:
    """A backend on the same vocabulary."""
    other = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        other.normalizer = backend.normalizer
    if words is not None:
        other.pre_tokenizer = words
    other.add_tokens(added)
    return other


def _without_first_space(
    words: tokenizers.pre_tokenizers.PreTokenizer | None,
) -> tokenizers.pre_tokenizers.PreTokenizer | None:
    """For what is not the text's beginning, where that alone gets a space in front."""
    written = "" if words is None else words.__getstate__().decode()
    if '"prepend_scheme":"first"' not in written:
        return words
    never = json.loads(written.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"'))
    parts = {"added_tokens": [], "normalizer": None, "pre_tokenizer": never, "post_processor": None, "decoder": None}
    shell = {"version": "1.0", **parts, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    later: tokenizers.pre_tokenizers.PreTokenizer = tokenizers.Tokenizer.from_str(json.dumps(shell)).pre_tokenizer
    return later
