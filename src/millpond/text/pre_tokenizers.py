"""How text is cut into words before byte-level BPE: one entry for each `tokenizer.ggml.pre` that we know.

Each entry does what the model's own Hugging Face tokenizer does; a wrong one gives text that is quietly worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_JAPANESE = "一-龥\u3040-\u309f\u30a0-\u30ff"
_CASED_LETTERS = (  # those that DeepSeek's words are made of
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80"
    "-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True, slots=True)
class WordSplit:
    """One way to cut text: by each of `steps` in turn, every piece that matches one on its own.

    ignore_merges takes a word that is a token whole, whatever the merges say; nfc composes characters first;
    add_bos is what a file that does not say is taken to mean.
    """

    steps: tuple[str | PreTokenizer, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """The pre-tokenizer, which spells the words in the byte alphabet."""
        parts = [Split(Regex(step), "isolated") if isinstance(step, str) else step for step in self.steps]
        if not any(isinstance(part, ByteLevel) for part in parts):
            parts.append(ByteLevel(add_prefix_space=False, use_regex=False))
        return Sequence(parts)


def _words(numbers: str, symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*", contractions: str = _CONTRACTIONS) -> str:
    """The pattern of cl100k and its many children, which differ in how numbers are grouped."""
    return rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{symbols}|\s*[\r\n]+|{_SPACES}"


def _cased_words(numbers: str, suffix: str = "", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*", but: str = "") -> str:
    """The pattern of o200k and its children, which cut where lower case turns to upper; `but` leaves a script out."""
    upper, lower = (f"{letters[:-1]}{but}]" for letters in (_UPPER, _LOWER))
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
    return rf"{words}|{numbers}|{symbols}|\s*[\r\n]+|{_SPACES}"


_GPT2_REGEX = ByteLevel(add_prefix_space=False, use_regex=True)
_ONE_DIGIT = Digits(individual_digits=True)
_CL100K = _words(r"\p{N}{1,3}")
_SINGLE_NUMBERS = _words(r"\p{N}")
_O200K = _cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
_NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|\s*[\r\n]+|{_SPACES}"
)
_CJK_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"

GPT2 = WordSplit((_GPT2_REGEX,))
_GPT_NEOX = WordSplit((_GPT2_REGEX,), nfc=True)
_STARCODER = WordSplit((_ONE_DIGIT, _GPT2_REGEX))
_LLAMA3 = WordSplit((_CL100K,), ignore_merges=True, add_bos=True)
_DBRX = WordSplit((_CL100K,))
_QWEN2 = WordSplit((_SINGLE_NUMBERS,), nfc=True)
_STABLELM2 = WordSplit((_SINGLE_NUMBERS,))
_GPT4O = WordSplit((_O200K,))
_BLOOM = WordSplit((_NO_PUNCTUATION,))
_DEEPSEEK3 = WordSplit((r"\p{N}{1,3}", f"[{_JAPANESE}]+", _DEEPSEEK_WORDS))
_BAILING = WordSplit(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
        rf"|{_SPACES}",
    )
)

WORD_SPLITS: Mapping[str, WordSplit] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"), GPT2),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe", "a.x-4.0", "mellum", "jais", "trillion"), GPT2),
    **dict.fromkeys(("granite-docling", "exaone4"), GPT2),
    **dict.fromkeys(("mpt", "olmo", "modern-bert"), _GPT_NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _STARCODER),
    "command-r": WordSplit((_ONE_DIGIT, _GPT2_REGEX), nfc=True),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _DBRX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "f2llmv2"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _STABLELM2),
    "qwen35": WordSplit(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
            rf"|\s*[\r\n]+|{_SPACES}",
        ),
        nfc=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "tekken": WordSplit((_cased_words(r"\p{N}"),), ignore_merges=True, add_bos=True),
    "deepseek-llm": WordSplit(
        (
            "[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CJK_AND_HANGUL,
            _ONE_DIGIT,
        )
    ),
    "deepseek-coder": WordSplit(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, _ONE_DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "falcon": WordSplit(
        (Punctuation("contiguous"), _GPT2_REGEX, Digits(individual_digits=False), "[0-9][0-9][0-9]"),
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": WordSplit((_NO_PUNCTUATION, _ONE_DIGIT)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": WordSplit((_words(r"\p{N}{1}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "exaone-moe": WordSplit(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    "youtu": WordSplit(
        (
            f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[{_JAPANESE}]+",
            _cased_words(r"\p{N}", f"{_CONTRACTIONS}?"),
        ),
        ignore_merges=True,
    ),
    "kimi-k2": WordSplit(
        (
            r"[\p{Han}]+|"
            + _cased_words(
                r"\p{N}{1,3}", f"{_CONTRACTIONS}?", symbols=r" ?[^\s\p{L}\p{N}]+[\r\n]*", but=r"&&[^\p{Han}]"
            ),
        )
    ),
    "chameleon": WordSplit(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            _ONE_DIGIT,
            Punctuation("isolated"),
            _GPT2_REGEX,
        ),
        add_bos=True,
    ),
}
