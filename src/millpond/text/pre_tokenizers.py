"""How text is cut into words before byte-level BPE: one entry for each `tokenizer.ggml.pre` that we know.

Each entry does what the model's own Hugging Face tokenizer does; a wrong one gives text that is quietly worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

# Numbers are the one thing in which Llama 3 and Qwen 2 differ: up to three digits together, or each on its own.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
    r"|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


@dataclass(frozen=True, slots=True)
class WordSplit:
    """One way to cut text. `build` makes its pre-tokenizer.

    ignore_merges takes a word that is a token whole, whatever the merges say; nfc composes characters first;
    add_bos is what a file that does not say is taken to mean.
    """

    build: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


def _words(numbers: str) -> PreTokenizer:
    pattern = Regex(_WORDS.format(numbers=numbers))
    return Sequence([Split(pattern, behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3() -> PreTokenizer:
    return _words(r"\p{N}{1,3}")


def _qwen2() -> PreTokenizer:
    return _words(r"\p{N}")


_LLAMA3 = WordSplit(_llama3, ignore_merges=True, add_bos=True)
_QWEN2 = WordSplit(_qwen2, nfc=True)

GPT2 = WordSplit(_gpt2)
WORD_SPLITS: Mapping[str, WordSplit] = {
    "gpt-2": GPT2,
    "smollm": WordSplit(_smollm),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
