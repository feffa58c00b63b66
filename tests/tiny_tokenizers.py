"""Small tokenizers of every family, learnt in the test, with the settings that the families' tokenizer.json files have.

Each is written twice: as the tokenizer.json of a folder, and as the metadata of a GGUF file by the `gguf` package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from awkward import CORPUS

SPECIAL = ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>")
USER_DEFINED = ("<think>", "[INST]")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

NFC = {"type": "NFC"}
DIGITS = {"type": "Digits", "individual_digits": True}
GPT2_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
ONLY_BYTES = {**GPT2_WORDS, "use_regex": False}
LAST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
)
HAN = "[一-龥ࠀ-一가-\ud7ff]+"


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def splits(*patterns: str) -> tuple[dict[str, Any], ...]:
    return (*map(split, patterns), ONLY_BYTES)


@dataclass(frozen=True)
class Family:
    """pre: its name in a GGUF; the rest is its tokenizer.json's."""

    pre: str
    words: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False


CL100K = rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LAST}"
QWEN2 = CL100K.replace("{1,3}", "")
O200K = CASED.replace("SUFFIX", f"{SUFFIXES}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LAST}"
TEKKEN = CASED.replace("SUFFIX", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LAST}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LAST}",
)
FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    GPT2_WORDS,
    {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]"),
)
BLOOM = split(r" ?[^(\s|[.,!?…。，、।۔،])]+")

FAMILIES: dict[str, Family] = {
    "llama 3": Family("llama-bpe", splits(CL100K), ignore_merges=True),
    "olmo 2, phi 4": Family("dbrx", splits(CL100K)),
    "smollm 3": Family("smaug-bpe", splits(CL100K)),
    "qwen 2, qwen 3": Family("qwen2", splits(QWEN2), NFC),
    "stablelm 2": Family("stablelm2", splits(QWEN2)),
    "gpt 2": Family("gpt-2", (GPT2_WORDS,)),
    "olmo, gpt neox": Family("olmo", (GPT2_WORDS,), NFC),
    "smollm": Family("smollm", (DIGITS, GPT2_WORDS)),
    "starcoder": Family("starcoder", (DIGITS, GPT2_WORDS)),
    "granite": Family("refact", (DIGITS, GPT2_WORDS)),
    "command r": Family("command-r", (DIGITS, GPT2_WORDS), NFC),
    "phi 4 mini, gpt 4o": Family("gpt-4o", splits(O200K)),
    "mistral nemo": Family("tekken", splits(TEKKEN), ignore_merges=True),
    "deepseek v3": Family("deepseek-v3", splits(*DEEPSEEK3)),
    "deepseek coder": Family(
        "deepseek-coder", (*map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN)), DIGITS, ONLY_BYTES)
    ),
    "falcon": Family("falcon", FALCON),
    "bloom": Family("bloom", (BLOOM, ONLY_BYTES)),
    "viking": Family("viking", (BLOOM, DIGITS, ONLY_BYTES)),
}


@cache
def byte_level(name: str, size: int = 1200) -> Tokenizer:
    """A byte-level BPE tokenizer of the family. A tenth of its merges are missing, so that some tokens are made by
    none: they are found only where words that are tokens are taken whole."""
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(json.dumps(skeleton(family)))
    trainer = BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER_DEFINED])
    written = json.loads(tokenizer.to_str())
    merges = written["model"]["merges"]
    del merges[len(merges) * 9 // 10 :]
    return Tokenizer.from_str(json.dumps(written))


def skeleton(family: Family) -> dict[str, Any]:
    words = family.words[0] if len(family.words) == 1 else {"type": "Sequence", "pretokenizers": list(family.words)}
    model = {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": family.ignore_merges}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": family.normalizer,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def byte_level_metadata(name: str, path: Path) -> dict[str, Any]:
    """The family's tokenizer as a GGUF file's metadata, written by the `gguf` package."""
    written = json.loads(byte_level(name).to_str())
    vocab, added = written["model"]["vocab"], {each["id"]: each for each in written["added_tokens"]}
    tokens = {token_id: token for token, token_id in vocab.items()} | {i: each["content"] for i, each in added.items()}
    types = {i: (CONTROL if each["special"] else USER) for i, each in added.items()}
    merges = [" ".join(pair) for pair in written["model"]["merges"]]
    return gguf_metadata(
        path,
        model="gpt2",
        pre=FAMILIES[name].pre,
        tokens=[tokens[i] for i in range(len(tokens))],
        types=[types.get(i, NORMAL) for i in range(len(tokens))],
        merges=merges,
        roles={"bos": 1, "eos": 2, "unk": 0},
    )


def gguf_metadata(
    path: Path,
    *,
    model: str,
    tokens: list[str],
    types: list[int],
    roles: Mapping[str, int],
    pre: str | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    architecture: str = "llama",
    flags: Mapping[str, bool] | None = None,
    charsmap: bytes = b"",
) -> dict[str, Any]:
    """Write a GGUF file that has a tokenizer alone, and read it again with the product's reader."""
    from millpond.load.gguf import open_gguf

    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for role, token_id in roles.items():
        getattr(writer, f"add_{role}_token_id")(token_id)
    for flag, value in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{flag}", value)
    if charsmap:
        writer.add_precompiled_charsmap(charsmap)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(open_gguf(path).metadata)


def write_tiny_tokenizer(folder: Path, **settings: Any) -> Path:
    """tokenizer.json and its settings for the vocabulary of `tiny_llama`, cut as its GGUF says."""
    from tiny_llama import CHAT_TEMPLATE, MERGES, SPECIAL_TOKENS, vocabulary

    tokens, _ = vocabulary()
    written = skeleton(FAMILIES["smollm"])
    written["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": list(MERGES)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    written["added_tokens"] = [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)]
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    unknown, begin, end = SPECIAL_TOKENS
    roles = {"unk_token": unknown, "bos_token": begin, "eos_token": end, "pad_token": end}
    config = {**roles, "chat_template": CHAT_TEMPLATE, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
