"""What a tokenizer is made of, wherever that was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import tokenizers

from millpond.text.vocabulary import SPECIAL_TYPES, Vocabulary

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
# What a vocabulary's roles are called where Hugging Face lists them, and in chat templates.
NAMES_OF_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# Special tokens that end an answer wherever they are. Files often name one of those that a model uses.
_ENDS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|end_of_turn|>"),
        *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>"),
    }
)
_HARMONY = frozenset({"<|end|>", "<|return|>", "<|call|>"})  # together: the first ends a part of an answer only


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenizerSource:
    """begin and end are the ids that go around a text which is no chat; ends are those that end an answer.

    strips_space: a text gets a space in front, which decoding takes away again. templates are the chat templates by
    name: "default" and perhaps "tool_use". kind says in a few words what it is.
    """

    vocabulary: Vocabulary
    backend: tokenizers.Tokenizer
    begin: tuple[int, ...]
    end: tuple[int, ...]
    ends: frozenset[int]
    kind: str
    strips_space: bool = False
    templates: Mapping[str, str] = field(default_factory=dict)


def usual_ends(vocabulary: Vocabulary, named: Iterable[int] = ()) -> frozenset[int]:
    """The ids that a file names, and its special tokens that everybody takes as an end."""
    special = {vocabulary.tokens[i]: i for i in vocabulary.ids_of(SPECIAL_TYPES)}
    found = _ENDS & special.keys()
    if found >= _HARMONY:
        found -= {"<|end|>"}
    return frozenset(named) | {special[token] for token in found}
