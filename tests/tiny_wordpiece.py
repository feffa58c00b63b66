"""Small WordPiece tokenizers, learnt in the test: as a folder of Hugging Face, and as a GGUF's metadata."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import WordPieceTrainer

from awkward import CORPUS
from tiny_tokenizers import CONTROL, NORMAL

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, CLS, SEP, MASK = range(5)
FAMILIES = {"bert, lower case": True, "bert, as it is": False}
ROLES = {"pad_token": PAD, "unk_token": UNKNOWN, "cls_token": CLS, "sep_token": SEP, "mask_token": MASK}


@cache
def learnt(name: str, size: int = 1500) -> Tokenizer:
    """With the settings that the tokenizer.json of these models have."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=FAMILIES[name])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    marks = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    return tokenizer


def write_folder(name: str, folder: Path) -> Path:
    """tokenizer.json and its settings; cut and padded, as those of sentence-transformers are."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(learnt(name).to_str())
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {role: SPECIAL[token_id] for role, token_id in ROLES.items()}
    settings = {"do_lower_case": FAMILIES[name], "tokenizer_class": "BertTokenizer", **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def wordpiece_metadata(name: str) -> dict[str, Any]:
    """What llama.cpp's converter makes of it: a word has U+2581 in front, and what goes on with one has nothing."""
    vocab = learnt(name).get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [_as_in_gguf(token) for token in tokens],
        "tokenizer.ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.seperator_token_id": SEP,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.cls_token_id": CLS,
        "tokenizer.ggml.mask_token_id": MASK,
    }


def _as_in_gguf(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else "\u2581" + token
