"""Small SentencePiece models learnt in the test: the tokenizer.model, its GGUF, and its family's tokenizer.json."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from awkward import CORPUS
from tiny_tokenizers import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, gguf_metadata

UNDERLINE = "\u2581"
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": UNDERLINE}
BACK = {"type": "Replace", "pattern": {"String": UNDERLINE}, "content": " "}
FALLBACK = ({"type": "ByteFallback"}, {"type": "Fuse"})
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": UNDERLINE, "prepend_scheme": "always", "split": True}
SPACES = [UNDERLINE * count for count in range(2, 6)]


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


@dataclass(frozen=True)
class Family:
    """model: its name in a GGUF; training: what the trainer is told; parts: of its tokenizer.json.

    after: special tokens behind the vocabulary, by whether they take the whitespace behind them along.
    """

    model: str
    training: dict[str, Any]
    parts: dict[str, Any]
    flags: dict[str, bool]
    architecture: str = "llama"
    after: Mapping[str, bool] = field(default_factory=dict)


BPE = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "remove_extra_whitespaces": False,
    "control_symbols": ["<|im_start|>", "<|im_end|>"],
}
LLAMA = {
    "normalizer": sequence("normalizers", {"type": "Prepend", "prepend": UNDERLINE}, REPLACE),
    "pre_tokenizer": None,
    "decoder": sequence("decoders", BACK, *FALLBACK, STRIP),
}
GEMMA = {
    "normalizer": REPLACE,
    "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    "decoder": sequence("decoders", BACK, *FALLBACK),
}
T5 = {"normalizer": None, "pre_tokenizer": METASPACE, "decoder": METASPACE}

FAMILIES: dict[str, Family] = {
    "llama 2, mistral": Family("llama", BPE, LLAMA, {"add_space_prefix": True}),
    "gemma": Family(
        "llama",
        {
            **BPE,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["\n", "\n\n", "\n\n\n", "\t", *SPACES, "<table>", "</b>"],
        },
        GEMMA,
        {"add_space_prefix": False},
        "gemma3",
    ),
    "phi 3": Family(
        "llama",
        {**BPE, "control_symbols": []},
        LLAMA,
        {"add_space_prefix": True},
        "phi3",
        {"<|endoftext|>": False, "<|assistant|>": True, "<|system|>": True, "<|end|>": True, "<|user|>": True},
    ),
    "t5": Family(
        "t5",
        {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "bos_id": -1, "pad_id": 3},
        T5,
        {"add_space_prefix": True, "remove_extra_whitespaces": True, "add_bos_token": False, "add_eos_token": True},
    ),
}


@cache
def learnt(name: str) -> bytes:
    """The tokenizer.model of a family."""
    model = io.BytesIO()
    import_module("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter(each for each in CORPUS * 2 if each.strip() and "\0" not in each),
        model_writer=model,
        vocab_size=900,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        **FAMILIES[name].training,
    )
    return model.getvalue()


@dataclass(frozen=True)
class Pieces:
    """What a tokenizer.model holds, as `sentencepiece` reads it, and the family's tokens behind it."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    charsmap: bytes
    user_defined: list[str]


def pieces(name: str) -> Pieces:
    processor = import_module("sentencepiece").SentencePieceProcessor(model_proto=learnt(name))
    proto = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto.FromString(learnt(name))
    tokens, scores, types = [], [], []
    for i in range(processor.get_piece_size()):
        tokens.append(processor.id_to_piece(i))
        scores.append(processor.get_score(i))
        kinds = {
            UNKNOWN: processor.is_unknown(i), CONTROL: processor.is_control(i), UNUSED: processor.is_unused(i),
            BYTE: processor.is_byte(i),
        }  # fmt: skip
        types.append(next((kind for kind, is_one in kinds.items() if is_one), NORMAL))
    user_defined = [piece.piece for piece in proto.pieces if piece.type == USER]
    for token in user_defined:
        types[tokens.index(token)] = USER
    for token in FAMILIES[name].after:
        tokens.append(token)
        scores.append(-1000.0)
        types.append(CONTROL)
    return Pieces(tokens, scores, types, proto.normalizer_spec.precompiled_charsmap, user_defined)


def sentencepiece_metadata(name: str, path: Path) -> dict[str, Any]:
    """As llama.cpp's converter writes it: runs of spaces that are tokens of their own are written as spaces."""
    family, held = FAMILIES[name], pieces(name)
    tokens = [
        token.replace(UNDERLINE, " ") if kind == USER else token
        for token, kind in zip(held.tokens, held.types, strict=True)
    ]
    ids = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
    return gguf_metadata(
        path,
        model=family.model,
        pre="default",
        tokens=tokens,
        types=held.types,
        scores=held.scores,
        roles={role: tokens.index(token) for role, token in ids.items() if token in tokens},
        architecture=family.architecture,
        flags=family.flags,
        charsmap=held.charsmap if family.model == "t5" else b"",
    )


def write_json_folder(name: str, folder: Path) -> Path:
    """tokenizer.json as the family's repositories have it, with merges by transformers."""
    family, held = FAMILIES[name], pieces(name)
    merges = import_module("transformers.tokenization_utils_base").generate_merges
    vocab = {token: i for i, token in enumerate(held.tokens)}
    if family.model == "t5":
        model = {"type": "Unigram", "unk_id": held.types.index(UNKNOWN), "byte_fallback": False}
        model["vocab"] = [list(pair) for pair in zip(held.tokens, held.scores, strict=True)]
    else:
        mergeable = {
            token: (1000.0 - i if held.types[i] == USER else held.scores[i])  # runs of spaces come first, by id
            for token, i in vocab.items()
            if held.types[i] == NORMAL or token in SPACES
        }
        model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab}
        model["merges"] = [list(pair) for pair in merges(vocab, mergeable)]
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **flags, "rstrip": strips_right(family, token), "special": held.types[i] != USER}
        for token, i in vocab.items()
        if held.types[i] in (UNKNOWN, CONTROL, USER) and token not in SPACES
    ]
    parts = dict(family.parts)
    if family.model == "t5":
        charsmap = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(held.charsmap).decode()}
        runs = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        ends = {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
        parts["normalizer"] = sequence("normalizers", charsmap, ends, runs)
    return _write(
        folder, {"version": "1.0", "added_tokens": added, "post_processor": None, **parts, "model": model}, name
    )


def strips_right(family: Family, token: str) -> bool:
    return family.after.get(token, family.architecture == "phi3" and token == "</s>")


def _write(folder: Path, tokenizer: dict[str, Any], name: str) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(name)), encoding="utf-8")
    return folder


def settings(name: str) -> dict[str, Any]:
    """The tokenizer_config.json; tokens behind the vocabulary are listed in it, as Phi 3's is."""
    start = len(pieces(name).tokens) - len(FAMILIES[name].after)
    added = {
        str(start + index): {"content": token, "rstrip": strips, "special": True, "normalized": False}
        for index, (token, strips) in enumerate(FAMILIES[name].after.items())
    }
    if FAMILIES[name].architecture == "phi3":
        added["2"] = {"content": "</s>", "rstrip": True, "special": True, "normalized": False}
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    known = {role: token for role, token in roles.items() if token in pieces(name).tokens}
    return {**known, "added_tokens_decoder": added}


def write_model_folder(name: str, folder: Path) -> Path:
    """tokenizer.model and its settings alone."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(learnt(name))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(name)), encoding="utf-8")
    return folder
