"""A reader of SentencePiece's tokenizer.model: the few fields of its protocol buffer that encoding depends on."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millpond.errors import ModelFileError
from millpond.text.backends import Normalizing
from millpond.text.files import read_bytes

MAX_BYTES = 256 << 20
UNIGRAM, BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # how a field is written
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_ROLES = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}  # of the trainer's fields


@dataclass(slots=True)
class SentencePieceModel:
    """types are numbered as TokenType is. roles leave out what the model has no token for (-1)."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    algorithm: int = UNIGRAM
    roles: dict[str, int] = field(default_factory=lambda: {"unknown": 0, "bos": 1, "eos": 2})
    normalizing: Normalizing = field(default_factory=lambda: Normalizing(removes_extra_spaces=True))


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Raises ModelFileError, naming the file and the place, for what is cut, malformed or not supported."""
    data = read_bytes(path, MAX_BYTES)
    model = SentencePieceModel()
    try:
        for number, value in _fields(data):
            if number == 1:
                _read_piece(model, value)
            elif number == 2:
                _read_trainer(model, value)
            elif number == 3:
                model.normalizing = _normalizing(value)
    except (ValueError, TypeError, struct.error) as error:
        raise ModelFileError(f"{path.name} is no SentencePiece model, or cut: {error}") from error
    if model.algorithm not in (UNIGRAM, BPE):
        raise ModelFileError(
            f"{path.name} is of model type {model.algorithm}; only 1 (unigram) and 2 (BPE) can be read"
        )
    if not model.pieces:
        raise ModelFileError(f"{path.name} has no pieces")
    return model


def _read_piece(model: SentencePieceModel, data: bytes) -> None:
    piece, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == 1:
            piece = value.decode()
        elif number == 2:
            (score,) = struct.unpack("<f", value)
        elif number == 3:
            kind = _whole(value)
    if not 1 <= kind <= 6:
        raise ValueError(f"piece {len(model.pieces)} is of type {kind}, not 1 to 6")
    model.pieces.append(piece)
    model.scores.append(score)
    model.types.append(kind)


def _read_trainer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.algorithm = _whole(value)
        elif number == 24 and _whole(value):
            raise ValueError("it writes spaces behind words (treat_whitespace_as_suffix), which is not supported")
        elif number in _ROLES:
            model.roles[_ROLES[number]] = _whole(value)
    model.roles = {role: token_id for role, token_id in model.roles.items() if token_id >= 0}


def _normalizing(data: bytes) -> Normalizing:
    charsmap, adds_space, removes, escapes = b"", True, True, True
    for number, value in _fields(data):
        if number == 2:
            charsmap = bytes(value)
        elif number == 3:
            adds_space = bool(_whole(value))
        elif number == 4:
            removes = bool(_whole(value))
        elif number == 5:
            escapes = bool(_whole(value))
    if not escapes:
        raise ValueError("it leaves spaces as they are (escape_whitespaces is off), which is not supported")
    return Normalizing(adds_space, removes, charsmap)


def _whole(value: bytes) -> int:
    """A varint's bytes as a signed number of 64 bits."""
    number = sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(value)) & (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each field's number and its bytes: those of a varint as they are written, others without their length."""
    place = 0
    while place < len(data):
        head, place = _varint(data, place)
        number, kind = _whole(head) >> 3, head[0] & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
        elif kind in _FIXED or kind == _BYTES:
            length = _FIXED.get(kind)
            if length is None:
                size, place = _varint(data, place)
                length = _whole(size)
            if not 0 <= length <= len(data) - place:
                raise ValueError(f"field {number} takes {length} bytes, {len(data) - place} are left")
            value, place = data[place : place + length], place + length
        else:
            raise ValueError(f"field {number} is written in way {kind}, which is not known")
        yield number, value


def _varint(data: bytes, place: int) -> tuple[bytes, int]:
    end = place
    while end < len(data) and data[end] & 0x80:
        end += 1
    if end >= len(data) or end - place >= 10:
        raise ValueError(f"a number at byte {place} has no end")
    return data[place : end + 1], end + 1
