"""A vocabulary: every token's text and type, the merges or scores, and the bytes each token stands for.

Byte-level vocabularies write ordinary tokens in GPT-2's byte alphabet, where each of the 256 bytes has a printable
character; SentencePiece's write a space as U+2581; WordPiece's have ## in front of what goes on with a word. Control
and user-defined tokens are written as they are.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, cast

from millpond.errors import InvalidRequestError, ModelFileError


class TokenType(IntEnum):
    """The numbers of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Spelling(Enum):
    """How ordinary tokens are written."""

    BYTES = "bytes"
    SPACES = "spaces"
    WORDS = "words"


SPACE = "\u2581"
CONTINUED = "##"
SPECIAL_TYPES = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})
_ADDED_TYPES = SPECIAL_TYPES | {TokenType.USER_DEFINED}
_OUTSIDE_BPE = frozenset({TokenType.UNUSED, TokenType.BYTE})
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")
_MARKS = frozenset({"bos", "eos", "eot", "eom"})
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes are U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF: Mapping[str, int] = _byte_alphabet()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Vocabulary:
    """tokens[i] and types[i] are the text and the TokenType of id i; merges are in order of rank.

    roles holds the ids that the file names: bos, eos, eot, eom (end of message), unknown, padding. scores[i] is that
    of id i in a SentencePiece vocabulary, where a higher one is merged first.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    roles: Mapping[str, int]
    spelling: Spelling = Spelling.BYTES
    scores: tuple[float, ...] = ()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, none for an unused one. InvalidRequestError for an unknown id."""
        if not 0 <= token_id < len(self.tokens):
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary: ids go from 0 to {len(self.tokens) - 1}"
            )
        token, kind = self.tokens[token_id], self.types[token_id]
        if kind == TokenType.BYTE:
            return bytes([int(token[3:5], 16)])
        if kind == TokenType.UNUSED:
            return b""
        if self.spelling is Spelling.SPACES:
            return token.replace(SPACE, " ").encode()
        if self.spelling is Spelling.WORDS:
            return (token.removeprefix(CONTINUED) if token.startswith(CONTINUED) else f" {token}").encode()
        return _spelled_bytes(token) if kind == TokenType.NORMAL else token.encode()

    def ids_of(self, kinds: frozenset[TokenType]) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in kinds]

    def added_ids(self) -> list[int]:
        """Tokens that are found in the text before it is cut into words, and are never split."""
        return self.ids_of(_ADDED_TYPES)

    def bpe_ids(self, with_bytes: bool = False) -> dict[str, int]:
        """Text to id of all tokens that encoding may give; byte tokens only where bytes are fallen back to."""
        ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        for token_id in self.ids_of(frozenset({TokenType.UNUSED}) if with_bytes else _OUTSIDE_BPE):
            ids.pop(self.tokens[token_id], None)
        ids.pop("", None)
        return ids

    @property
    def unknown_id(self) -> int | None:
        """The token of what has no other, by its role or its type."""
        typed = self.ids_of(frozenset({TokenType.UNKNOWN}))
        return self.roles.get("unknown", typed[0] if typed else None)

    @property
    def has_bytes(self) -> bool:
        """Whether every byte has a token of its own."""
        return len(self.ids_of(frozenset({TokenType.BYTE}))) == 256


def _spelled_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:  # not written in the alphabet: the reference tokenizers take such a token as it stands
        return token.encode()


def read_vocabulary(metadata: Mapping[str, Any], spelling: Spelling = Spelling.BYTES) -> Vocabulary:
    """Check and take the vocabulary of a GGUF file: with merges where bytes are spelled, with scores where spaces are,
    and where words are, as Hugging Face writes them (see _as_written). The begin and the ends of a text are control
    tokens, whatever their type says.

    ModelFileError for a list that is missing or of the wrong length or kind, for a duplicate, for a merge of
    tokens that do not exist, and for a named id outside the vocabulary.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if spelling is Spelling.WORDS:
        tokens = list(map(_as_written, tokens))
    types = _types(metadata, len(tokens))
    merges = _pairs(_strings(metadata, "tokenizer.ggml.merges")) if spelling is Spelling.BYTES else ()
    scores = _scores(metadata, len(tokens)) if spelling is Spelling.SPACES else ()
    ids = {role: role_id(metadata, role, len(tokens)) for role in _ROLES}
    roles = {role: token_id for role, token_id in ids.items() if token_id is not None}
    for role in _MARKS & roles.keys():
        types[roles[role]] = TokenType.CONTROL
    vocabulary = Vocabulary(tuple(tokens), tuple(types), merges, roles, spelling, scores)
    check_tokens(vocabulary)
    _check_merges(vocabulary)
    return vocabulary


def _as_written(token: str) -> str:
    """A GGUF's word, which has U+2581 in front, and what goes on with one, which has nothing, as WordPiece has them;
    what is in square brackets stands as it is."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(SPACE) and len(token) > 1 else CONTINUED + token


def _scores(metadata: Mapping[str, Any], num_tokens: int) -> tuple[float, ...]:
    key = "tokenizer.ggml.scores"
    if key not in metadata:
        raise ModelFileError(f"the file has no {key}, which its tokenizer needs")
    try:
        scores = tuple(map(float, metadata[key]))
    except (TypeError, ValueError):
        raise ModelFileError(f"{key} must be a list of numbers") from None
    if len(scores) != num_tokens:
        raise ModelFileError(f"{key} has {len(scores)} entries for {num_tokens} tokens")
    if not all(map(math.isfinite, scores)):
        index = next(i for i, score in enumerate(scores) if not math.isfinite(score))
        raise ModelFileError(f"{key} holds {scores[index]} for token {index}; a score must be a number")
    return scores


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    if key not in metadata:
        raise ModelFileError(f"the file has no {key}, which its tokenizer needs")
    values = metadata[key]
    if isinstance(values, str) or not isinstance(values, Iterable) or not set(map(type, values)) <= {str}:
        raise ModelFileError(f"{key} must be a list of strings")
    return list(values)


def _types(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    values = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * num_tokens)
    try:
        types = [int(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        raise ModelFileError("tokenizer.ggml.token_type must be a list of integers") from None
    if len(types) != num_tokens:
        raise ModelFileError(f"tokenizer.ggml.token_type has {len(types)} entries for {num_tokens} tokens")
    unknown = set(types) - set(TokenType)
    if unknown:
        raise ModelFileError(f"tokenizer.ggml.token_type holds {min(unknown)}, which is no token type (1 to 6)")
    return types


def role_id(metadata: Mapping[str, Any], role: str, num_tokens: int) -> int | None:
    """The id that a GGUF file names for a role, None where it names none. ModelFileError for what is no token."""
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in metadata:
        return None
    try:
        token_id = operator.index(metadata[key])
    except TypeError:
        raise ModelFileError(f"{key} must be an integer, not {metadata[key]!r}") from None
    if not 0 <= token_id < num_tokens:
        raise ModelFileError(f"{key} is {token_id}, outside the vocabulary of {num_tokens} tokens")
    return token_id


def _pairs(merges: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = tuple(tuple(merge.split(" ")) for merge in merges)
    for index, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ModelFileError(f"merge {index} is {merges[index]!r}, not two tokens with a space between them")
    return cast("tuple[tuple[str, str], ...]", pairs)


def check_tokens(vocabulary: Vocabulary) -> None:
    """Raise ModelFileError for a token that is there twice, and a byte token that names no byte."""
    first: dict[str, int] = {}
    for token_id, token in enumerate(vocabulary.tokens):
        if first.setdefault(token, token_id) != token_id and token:
            raise ModelFileError(f"tokens {first[token]} and {token_id} are both {token!r}")
    for token_id in vocabulary.ids_of(frozenset({TokenType.BYTE})):
        token = vocabulary.tokens[token_id]
        if not BYTE_TOKEN.fullmatch(token):
            raise ModelFileError(f"token {token_id} is a byte token but reads {token!r}, not <0x00> to <0xFF>")


def _check_merges(vocabulary: Vocabulary) -> None:
    ids = vocabulary.bpe_ids()
    for index, (left, right) in enumerate(vocabulary.merges):
        if not (left in ids and right in ids and left + right in ids):
            missing = next(token for token in (left, right, left + right) if token not in ids)
            raise ModelFileError(f"merge {index} needs the token {missing!r}, which the vocabulary does not have")
