"""Text to token ids and back, for the byte-level BPE tokenizer that a GGUF file describes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers
from tokenizers.models import BPE

from millpond.errors import ModelFileError
from millpond.text.checks import check_unicode
from millpond.text.pre_tokenizers import GPT2, WORD_SPLITS, WordSplit
from millpond.text.vocabulary import SPECIAL_TYPES, Vocabulary, read_vocabulary

logger = logging.getLogger(__name__)

# Marks that end a turn. Files often name only the end of the text, and the chat template alone shows the other.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tokenizer:
    """A tokenizer, safe to use from several threads at once. Build it with `from_gguf`.

    vocabulary is what the file lists; ids from vocab_size on are padding rows of the model and no tokens.
    eos_token_ids are all the ids that end an answer. special_token_ids are left out of decoded text on request.
    """

    vocabulary: Vocabulary
    eos_token_ids: frozenset[int]
    special_token_ids: frozenset[int]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None
    _backend: tokenizers.Tokenizer
    _whole_texts: dict[int, str | None] = field(default_factory=dict)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF file's metadata, in about 0.1 s for 50,000 tokens.

        Raises ModelFileError, naming the key or the token, for what is missing, inconsistent or not supported.
        A file that does not say how to cut words gets GPT-2's way and a warning in the log.
        """
        split = _word_split(metadata)
        vocabulary = read_vocabulary(metadata)
        template = _chat_template(metadata)
        special = frozenset(vocabulary.ids_of(SPECIAL_TYPES))
        return cls(
            vocabulary=vocabulary,
            eos_token_ids=_end_ids(vocabulary, special, template),
            special_token_ids=special,
            adds_bos=_adds(metadata, "bos", vocabulary, split.add_bos),
            adds_eos=_adds(metadata, "eos", vocabulary, False),
            chat_template=template,
            _backend=_backend(vocabulary, split),
        )

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self.vocabulary.roles.get("bos")

    @property
    def eos_token_id(self) -> int | None:
        return self.vocabulary.roles.get("eos")

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts that a chat template may ask for: bos_token, eos_token, unk_token and pad_token, where named."""
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        roles = self.vocabulary.roles
        return {name: self.vocabulary.tokens[roles[role]] for role, name in names.items() if role in roles}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, the same as the model's Hugging Face tokenizer gives.

        The text of a control token, such as <|im_end|>, becomes that token wherever it stands, as it does there.
        A byte that the vocabulary has no token for is left out, as it is there. add_special_tokens adds BOS, where
        the file asks for it and the text does not start with it already; text rendered by a chat template carries
        its own, so encode it with add_special_tokens=False. InvalidRequestError for text that is not valid Unicode.
        Other Python threads run meanwhile.
        """
        check_unicode(text)
        # The batch call, even for one text: it lets go of the interpreter lock, and encode() does not.
        token_ids = list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return self._with_ends(token_ids) if add_special_tokens else token_ids

    def _with_ends(self, token_ids: list[int]) -> list[int]:
        before = [self.bos_token_id] if self.adds_bos and self.bos_token_id is not None else []
        after = [self.eos_token_id] if self.adds_eos and self.eos_token_id is not None else []
        return [*token_ids, *after] if token_ids[:1] == before else [*before, *token_ids, *after]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens' bytes; bytes that are not UTF-8 become U+FFFD. InvalidRequestError for a bad id."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        pieces = (self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, part of a character perhaps. InvalidRequestError for a bad id."""
        return self.vocabulary.token_bytes(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that is whole characters, None for any other. InvalidRequestError for a bad id."""
        if token_id not in self._whole_texts:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._whole_texts[token_id] = text
        return self._whole_texts[token_id]


def _word_split(metadata: Mapping[str, Any]) -> WordSplit:
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise ModelFileError("the file carries no tokenizer (it has no tokenizer.ggml.model)")
    if model != "gpt2":
        raise ModelFileError(f"tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is supported")
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = GPT2 if name == "default" else WORD_SPLITS.get(name)
    if split is None:
        known = ", ".join(sorted(WORD_SPLITS))
        raise ModelFileError(f"tokenizer.ggml.pre is {name!r}, a way to cut words that is not supported ({known} are)")
    if name == "default":
        logger.warning(
            "the model file does not say how its tokenizer cuts words (tokenizer.ggml.pre is missing or 'default'): "
            "cutting them as GPT-2 does; if that is not the model's way, its answers will be worse"
        )
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise ModelFileError("tokenizer.ggml.add_space_prefix is not supported for byte-level BPE")
    return split


def _adds(metadata: Mapping[str, Any], role: str, vocabulary: Vocabulary, default: bool) -> bool:
    key = f"tokenizer.ggml.add_{role}_token"
    adds = bool(metadata.get(key, default and role in vocabulary.roles))
    if adds and role not in vocabulary.roles:
        raise ModelFileError(f"{key} is true, but the file has no tokenizer.ggml.{role}_token_id")
    return adds


def _chat_template(metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"tokenizer.chat_template must be a string, not {type(template).__name__}")
    return template


def _end_ids(vocabulary: Vocabulary, special: Iterable[int], template: str | None) -> frozenset[int]:
    named = {vocabulary.roles[role] for role in ("eos", "eot", "eom") if role in vocabulary.roles}
    marks = {mark for mark in _TURN_ENDS if mark in (template or "")}
    return frozenset(named | {token_id for token_id in special if vocabulary.tokens[token_id] in marks})


def _backend(vocabulary: Vocabulary, split: WordSplit) -> tokenizers.Tokenizer:
    model = BPE(vocab=vocabulary.bpe_ids(), merges=vocabulary.merges, ignore_merges=split.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = split.build()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    # special=False for all: the backend only has to find them, which of them are special we keep ourselves.
    added = [vocabulary.tokens[token_id] for token_id in vocabulary.added_ids()]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added if token])
    return backend
