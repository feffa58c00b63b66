"""The tokenizer that a GGUF file's metadata describes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from tokenizers import AddedToken

from millpond.errors import ModelFileError, shown
from millpond.text.backends import Normalizing, byte_level, sentencepiece_bpe, sentencepiece_unigram, word_pieces
from millpond.text.pre_tokenizers import GPT2, WORD_SPLITS, WordSplit
from millpond.text.source import DEFAULT_TEMPLATE, TOOL_TEMPLATE, TokenizerSource, usual_ends
from millpond.text.vocabulary import SPECIAL_TYPES, Spelling, Vocabulary, read_vocabulary, role_id

logger = logging.getLogger(__name__)

# Phi 3's special tokens take the whitespace behind them along, all but these. A GGUF has no field for it.
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def gguf_source(metadata: Mapping[str, Any]) -> TokenizerSource:
    """ModelFileError, naming the key or the token, for what is missing, inconsistent or not supported."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise ModelFileError("the file carries no tokenizer (it has no tokenizer.ggml.model)")
    read = _READERS.get(str(model))
    if read is None:
        known = "; ".join(f"{name!r} is {what}" for name, what in _KINDS.items())
        raise ModelFileError(f"tokenizer.ggml.model is {shown(model)}, which is not supported ({known})")
    return read(metadata)


def _byte_level(metadata: Mapping[str, Any]) -> TokenizerSource:
    split = _word_split(metadata)
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise ModelFileError("tokenizer.ggml.add_space_prefix is not supported for byte-level BPE")
    vocabulary = read_vocabulary(metadata)
    return TokenizerSource(
        vocabulary=vocabulary,
        backend=byte_level(vocabulary, split),
        begin=_added(metadata, "bos", vocabulary, split.add_bos),
        end=_added(metadata, "eos", vocabulary, False),
        ends=_ends(vocabulary),
        kind=f"{_KINDS['gpt2']}, words cut as {metadata.get('tokenizer.ggml.pre', 'default')}",
        templates=_templates(metadata),
    )


def _sentencepiece(metadata: Mapping[str, Any], *, model: str) -> TokenizerSource:
    is_bpe = model == "llama"
    normalizing = _normalizing(metadata)
    vocabulary = read_vocabulary(metadata, Spelling.SPACES)
    added = _phi3_tokens(vocabulary) if metadata.get("general.architecture") == "phi3" else {}
    return TokenizerSource(
        vocabulary=vocabulary,
        backend=(sentencepiece_bpe if is_bpe else sentencepiece_unigram)(vocabulary, normalizing, added),
        begin=_added(metadata, "bos", vocabulary, is_bpe),
        end=_added(metadata, "eos", vocabulary, not is_bpe),
        ends=_ends(vocabulary),
        kind=_KINDS[model],
        strips_space=normalizing.adds_space,
        templates=_templates(metadata),
    )


def _words(metadata: Mapping[str, Any]) -> TokenizerSource:
    vocabulary = read_vocabulary(metadata, Spelling.WORDS)
    return TokenizerSource(
        vocabulary=vocabulary,
        backend=word_pieces(vocabulary),
        begin=_named(metadata, ("cls", "bos"), "[CLS]", vocabulary),
        end=_named(metadata, ("seperator", "separator", "eos"), "[SEP]", vocabulary),  # the first is how files spell it
        ends=frozenset(),
        kind=_KINDS["bert"],
        strips_space=True,
    )


def _named(metadata: Mapping[str, Any], roles: Sequence[str], usual: str, vocabulary: Vocabulary) -> tuple[int]:
    """The id of the first of these roles that the file names, or of the token that mostly has it."""
    for role in roles:
        if (token_id := role_id(metadata, role, len(vocabulary.tokens))) is not None:
            return (token_id,)
    if usual not in vocabulary.tokens:
        raise ModelFileError(f"the file has no tokenizer.ggml.{roles[0]}_token_id and no token {usual}")
    return (vocabulary.tokens.index(usual),)


_KINDS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece BPE",
    "t5": "SentencePiece unigram",
    "bert": "WordPiece",
}
_READERS: Mapping[str, Callable[[Mapping[str, Any]], TokenizerSource]] = {
    "gpt2": _byte_level,
    **{model: partial(_sentencepiece, model=model) for model in ("llama", "t5")},
    "bert": _words,
}


def _phi3_tokens(vocabulary: Vocabulary) -> dict[str, AddedToken]:
    special = {vocabulary.tokens[token_id] for token_id in vocabulary.ids_of(SPECIAL_TYPES)} - _PHI3_PLAIN
    return {token: AddedToken(token, special=True, normalized=False, rstrip=True) for token in special}


def _word_split(metadata: Mapping[str, Any]) -> WordSplit:
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = GPT2 if name == "default" else WORD_SPLITS.get(str(name))
    if split is None:
        alike = ", ".join(get_close_matches(str(name)[:40], WORD_SPLITS)) or "gpt-2, llama-bpe, qwen2"
        raise ModelFileError(
            f"tokenizer.ggml.pre is {shown(name)}, a way to cut words that is not supported; {len(WORD_SPLITS)} are, "
            f"among them {alike}"
        )
    if name == "default":
        logger.warning(
            "the model file does not say how its tokenizer cuts words (tokenizer.ggml.pre is missing or 'default'): "
            "cutting them as GPT-2 does; if that is not the model's way, its answers will be worse"
        )
    return split


def _normalizing(metadata: Mapping[str, Any]) -> Normalizing:
    key = "tokenizer.ggml.precompiled_charsmap"
    try:
        charsmap = bytes(byte & 0xFF for byte in metadata.get(key, ()))
    except TypeError:
        raise ModelFileError(f"{key} must be a list of bytes") from None
    return Normalizing(
        adds_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        removes_extra_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=charsmap,
    )


def _added(metadata: Mapping[str, Any], role: str, vocabulary: Vocabulary, default: bool) -> tuple[int, ...]:
    """The id that the file asks to have put around a text."""
    key = f"tokenizer.ggml.add_{role}_token"
    if not metadata.get(key, default and role in vocabulary.roles):
        return ()
    if role not in vocabulary.roles:
        raise ModelFileError(f"{key} is true, but the file has no tokenizer.ggml.{role}_token_id")
    return (vocabulary.roles[role],)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = {
        DEFAULT_TEMPLATE: "tokenizer.chat_template",
        TOOL_TEMPLATE: f"tokenizer.chat_template.{TOOL_TEMPLATE}",
    }
    templates = {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}
    for name, template in templates.items():
        if not isinstance(template, str):
            raise ModelFileError(f"{keys[name]} must be a string, not {type(template).__name__}")
    return templates


def _ends(vocabulary: Vocabulary) -> frozenset[int]:
    roles = vocabulary.roles
    return usual_ends(vocabulary, [roles[role] for role in ("eos", "eot", "eom") if role in roles])
