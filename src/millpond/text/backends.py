"""From a vocabulary to what encodes text: byte-level BPE, SentencePiece BPE and unigram, WordPiece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from millpond.errors import ModelFileError, shown
from millpond.text.charsmap import is_whole
from millpond.text.pre_tokenizers import WordSplit
from millpond.text.vocabulary import CONTINUED, SPACE, SPECIAL_TYPES, Spelling, TokenType, Vocabulary

LONGEST_WORD = 100  # in characters; a longer one is the unknown token


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
            if not is_whole(self.charsmap):
                raise ModelFileError("the tokenizer's table of characters (precompiled_charsmap) is damaged")
            steps.append(normalizers.Precompiled(self.charsmap))
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
    runs = frozenset(_runs(vocabulary))
    ids = {_written(token) if i in runs else token: i for token, i in vocabulary.bpe_ids(True).items()}
    unknown = None if vocabulary.unknown_id is None else vocabulary.tokens[vocabulary.unknown_id]
    if unknown is not None and unknown not in ids:
        raise ModelFileError(f"the unknown token, {vocabulary.unknown_id}, has no text: {shown(unknown)}")
    model = BPE(
        vocab=ids,
        merges=implied_merges(vocabulary),
        unk_token=unknown,
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


def word_pieces(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """BERT's. It is made of lower case without accents where no token of the vocabulary has an upper case letter."""
    if (unknown := vocabulary.unknown_id) is None:
        raise ModelFileError("a WordPiece tokenizer needs an unknown token (tokenizer.ggml.unknown_token_id)")
    ids = vocabulary.bpe_ids()
    normal = [vocabulary.tokens[token_id] for token_id in vocabulary.ids_of(frozenset({TokenType.NORMAL}))]
    lowers = all(token == token.lower() for token in normal if not token.startswith("["))
    backend = tokenizers.Tokenizer(
        WordPiece(
            ids,
            unk_token=vocabulary.tokens[unknown],
            max_input_chars_per_word=LONGEST_WORD,
            continuing_subword_prefix=CONTINUED,
        )
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _add(backend, vocabulary, {})
    return backend


def implied_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to put an ordinary token together from two, the token of the highest score first.

    Runs of spaces that are tokens of their own come before all: SentencePiece finds them before it merges.
    """
    runs = {_written(vocabulary.tokens[token_id]) for token_id in _runs(vocabulary)}
    normal = vocabulary.ids_of(frozenset({TokenType.NORMAL}))
    scores = {vocabulary.tokens[token_id]: vocabulary.scores[token_id] for token_id in normal}
    pieces = scores.keys() | runs
    merges = _halves(sorted(scores, key=lambda token: -scores[token]), pieces)
    if len(set(scores.values())) < len(scores):  # of equal scores the longest parts, as in transformers
        merges.sort(key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))
    return _halves(sorted(runs, key=len), pieces) + merges


def _halves(tokens: Iterable[str], pieces: Set[str]) -> list[tuple[str, str]]:
    """The pieces that each token can be cut into two of, the longest left part first; one plain loop over millions."""
    merges: list[tuple[str, str]] = []
    add = merges.append
    for token in tokens:
        for place in range(len(token) - 1, 0, -1):
            left = token[:place]
            if left in pieces:
                right = token[place:]
                if right in pieces:
                    add((left, right))
    return merges


def _runs(vocabulary: Vocabulary) -> list[int]:
    """User-defined tokens of nothing but spaces, which some files write as they are, others as SentencePiece does."""
    user_defined = vocabulary.ids_of(frozenset({TokenType.USER_DEFINED}))
    return [i for i in user_defined if (token := vocabulary.tokens[i]) and not token.strip(" " + SPACE)]


def _written(run: str) -> str:
    return SPACE * len(run)


def _add(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, described: Mapping[str, AddedToken]) -> None:
    """Tokens that are found in the text before anything else. SentencePiece's runs of spaces are left to the merges."""
    runs = frozenset(_runs(vocabulary)) if vocabulary.spelling is Spelling.SPACES else frozenset[int]()
    found = [
        described.get(token) or AddedToken(token, special=vocabulary.types[i] in SPECIAL_TYPES, normalized=False)
        for i in vocabulary.added_ids()
        if (token := vocabulary.tokens[i]) and i not in runs
    ]
    backend.add_tokens(found)
