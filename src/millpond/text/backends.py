"""From a vocabulary to what encodes text: byte-level BPE, SentencePiece BPE, SentencePiece unigram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import tokenizers
from tokenizers import AddedToken, Regex, normalizers
from tokenizers.models import BPE, Unigram

from millpond.errors import ModelFileError
from millpond.text.pre_tokenizers import WordSplit
from millpond.text.vocabulary import SPACE, SPECIAL_TYPES, TokenType, Vocabulary


@dataclass(frozen=True, slots=True)
class Normalizing:
    """What SentencePiece does to a text first. charsmap is its own table of replacements, none if empty."""

    adds_space: bool = True
    removes_extra_spaces: bool = False
    charsmap: bytes = b""

    def build(self) -> normalizers.Normalizer:
        """In SentencePiece's order. ModelFileError for a charsmap that is none."""
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            try:
                steps.append(normalizers.Precompiled(self.charsmap))
            except Exception as error:  # the library knows no other
                raise ModelFileError(f"the tokenizer's table of characters is damaged: {error}") from error
        if self.removes_extra_spaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.adds_space:
            steps.append(normalizers.Prepend(SPACE))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def byte_level(vocabulary: Vocabulary, split: WordSplit) -> tokenizers.Tokenizer:
    model = BPE(vocab=vocabulary.bpe_ids(), merges=vocabulary.merges, ignore_merges=split.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = split.build()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    _add(backend, vocabulary, {})
    return backend


def sentencepiece_bpe(
    vocabulary: Vocabulary, normalizing: Normalizing, added: Mapping[str, AddedToken]
) -> tokenizers.Tokenizer:
    """The merges are those that the scores imply. `added` says more of tokens that are found first, by their text."""
    ids = {SPACE * len(token) if _is_spaces(token) else token: i for token, i in vocabulary.bpe_ids(True).items()}
    unknown = vocabulary.unknown_id
    model = BPE(
        vocab=ids,
        merges=list(implied_merges(vocabulary)),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=vocabulary.has_bytes,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizing.build()
    _add(backend, vocabulary, added)
    return backend


def sentencepiece_unigram(
    vocabulary: Vocabulary, normalizing: Normalizing, added: Mapping[str, AddedToken]
) -> tokenizers.Tokenizer:
    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    if (unknown := vocabulary.unknown_id) is None and not vocabulary.has_bytes:
        raise ModelFileError("a unigram tokenizer needs an unknown token (tokenizer.ggml.unknown_token_id)")
    backend = tokenizers.Tokenizer(Unigram(pieces, unknown, vocabulary.has_bytes))
    backend.normalizer = normalizing.build()
    _add(backend, vocabulary, added)
    return backend


def implied_merges(vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    """Every way to put an ordinary token together from two, the token of the highest score first.

    Runs of spaces come before all: SentencePiece finds them before it merges, whatever their score.
    """
    names = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if _is_ordinary(vocabulary, token_id)}
    runs = {SPACE * len(token): token_id for token, token_id in names.items() if _is_spaces(token)}
    pieces = {token: token_id for token, token_id in names.items() if not _is_spaces(token)} | runs
    for run in runs:
        yield from _halves(run, pieces)
    scores = vocabulary.scores
    ranked = sorted((token for token in pieces if token not in runs), key=lambda token: -scores[pieces[token]])
    for _, tied in groupby(ranked, key=lambda token: scores[pieces[token]]):
        first, *others = tied
        if not others:
            yield from _halves(first, pieces)
            continue
        pairs = [pair for token in (first, *others) for pair in _halves(token, pieces)]
        yield from sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)


def _is_ordinary(vocabulary: Vocabulary, token_id: int) -> bool:
    kind = vocabulary.types[token_id]
    return kind == TokenType.NORMAL or (kind == TokenType.USER_DEFINED and _is_spaces(vocabulary.tokens[token_id]))


def _is_spaces(token: str) -> bool:
    """Whether a token is a run of spaces, which some files write as they are."""
    return token != "" and not token.strip(" ")


def _halves(token: str, pieces: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The longest left part first."""
    for place in range(len(token) - 1, 0, -1):
        left, right = token[:place], token[place:]
        if left in pieces and right in pieces:
            yield left, right


def _add(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, described: Mapping[str, AddedToken]) -> None:
    """Tokens that are found in the text before anything else. Runs of spaces are left to the merges."""
    found = [
        described.get(token) or AddedToken(token, special=vocabulary.types[i] in SPECIAL_TYPES, normalized=False)
        for i in vocabulary.added_ids()
        if (token := vocabulary.tokens[i]) and not _is_spaces(token)
    ]
    backend.add_tokens(found)
