"""Text to token ids and back, by the tokenizer that a GGUF file or a folder of Hugging Face describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millpond.errors import InvalidRequestError, ModelFileError
from millpond.text.chat import ChatTemplate
from millpond.text.checks import check_unicode
from millpond.text.folder_source import folder_source
from millpond.text.gguf_source import gguf_source
from millpond.text.marks import RenderedChat
from millpond.text.source import DEFAULT_TEMPLATE, NAMES_OF_ROLES, TOOL_TEMPLATE, TokenizerSource
from millpond.text.spoken import SpokenText, encoded
from millpond.text.vocabulary import SPECIAL_TYPES, Vocabulary

PROBE = "Hi there, 7 \u00e9\u4e2d\n"  # what every tokenizer can encode, or leave out, one that can be used


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tokenizer:
    """A tokenizer, safe to use from several threads at once. Build it with `from_gguf` or `from_folder`.

    special_token_ids are left out of decoded text on request.
    """

    source: TokenizerSource
    special_token_ids: frozenset[int]
    _spoken: SpokenText
    _whole_texts: dict[int, str | None] = field(default_factory=dict)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF file's metadata, in about 0.1 s for 50,000 tokens.

        Raises ModelFileError, naming the key or the token, for what is missing, inconsistent or not supported.
        A byte-level one that does not say how to cut words gets GPT-2's way and a warning in the log.
        """
        return cls.of(gguf_source(metadata))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Build from tokenizer.json or tokenizer.model, and what lies beside it.

        Raises ModelFileError, naming the file and the field, for what is missing, inconsistent or not supported.
        """
        return cls.of(folder_source(folder))

    @classmethod
    def of(cls, source: TokenizerSource) -> Tokenizer:
        special = frozenset(source.vocabulary.ids_of(SPECIAL_TYPES))
        try:
            encoded(source.backend, PROBE)
        except InvalidRequestError as error:
            raise ModelFileError(f"no text can be encoded: {error}") from None
        return cls(source, special, SpokenText(source.backend, special))

    @property
    def vocabulary(self) -> Vocabulary:
        """What the file lists; ids from vocab_size on are padding rows of the model and no tokens."""
        return self.source.vocabulary

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All the ids that end an answer."""
        return self.source.ends

    @property
    def bos_token_id(self) -> int | None:
        return self.vocabulary.roles.get("bos")

    @property
    def eos_token_id(self) -> int | None:
        return self.vocabulary.roles.get("eos")

    @property
    def chat_template(self) -> str | None:
        return self.source.templates.get(DEFAULT_TEMPLATE)

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same tokenizer with this chat template in place of its own ones."""
        return replace(self, source=replace(self.source, templates={DEFAULT_TEMPLATE: template}))

    def make_chat_template(self) -> ChatTemplate:
        """Its chat templates, ready to render. ModelFileError for a syntax error in one."""
        tool_template = self.source.templates.get(TOOL_TEMPLATE)
        return ChatTemplate(
            self.chat_template, self.special_tokens, tool_template=tool_template, kept_text=self._spoken.special_texts
        )

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts that a chat template may ask for: bos_token, eos_token, unk_token and pad_token, where named."""
        roles = self.vocabulary.roles
        return {name: self.vocabulary.tokens[roles[role]] for role, name in NAMES_OF_ROLES.items() if role in roles}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, the same as the model's Hugging Face tokenizer gives.

        The text of a control token, such as <|im_end|>, becomes that token wherever it stands, as it does there.
        A byte that the vocabulary has no token for is left out, as it is there. add_special_tokens adds BOS and EOS,
        where the file asks for them and the text does not have them already; text rendered by a chat template carries
        its own, so encode it with add_special_tokens=False. InvalidRequestError for text that is not valid Unicode.
        Other Python threads run meanwhile.
        """
        check_unicode(text)
        token_ids = encoded(self.source.backend, text)
        return self._with_ends(token_ids) if add_special_tokens else token_ids

    def encode_chat(self, text: RenderedChat) -> list[int]:
        """The ids of what a chat template gave, which writes special tokens itself. Those that a message spells are
        text in them: they become what their characters are. InvalidRequestError for text that is not valid Unicode."""
        if not text.spoken:
            return self.encode(text, add_special_tokens=False)
        check_unicode(text)
        return self._spoken.encode(text)

    def _with_ends(self, token_ids: list[int]) -> list[int]:
        begin, end = list(self.source.begin), list(self.source.end)
        before = [] if token_ids[: len(begin)] == begin else begin
        after = [] if token_ids[len(token_ids) - len(end) :] == end else end
        return [*before, *token_ids, *after]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, continues: bool = False) -> str:
        """The text of the tokens' bytes; bytes that are not UTF-8 become U+FFFD. InvalidRequestError for a bad id.

        A space that encoding puts in front of a text is taken away, unless the text continues another.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        pieces = (self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        text = b"".join(pieces).decode(errors="replace")
        return text.removeprefix(" ") if self.source.strips_space and not continues else text

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
