"""Texts that tokenizers stumble over, the same for every family. AWKWARD are a few hundred; `long_runs` are long."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Iterator

SPECIAL = (
    "<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>",
    "<|begin_of_text|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|end|>", "[INST]", "[/INST]", "<think>",
)  # fmt: skip

WRITTEN = (
    "", " ", "  ", "   ", "    ", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "\t", "\t\t", " \t ", "\n ", " \n",
    " \n\n  \n", "\x0b\x0c", "\u2028\u2029", "\xa0", "\xa0\xa0 a", "\u200b", "\ufeff", "\ufeffa", "a\u00adb",
    "\u3000漢字\u3000", "a", " a", "a ", "  a", "a  ", " a ", "a b", "a  b", "a   b", "a\tb", "a\nb", "a\n\nb",
    "a\r\nb", "a \n b", "a \r\n b", "\ta", "\na", "a\n", "a\n\n\n\n", "    indented\n        more\n\tand a tab",
    "trailing   \n", "x" * 50, "ab" * 40, "I'm, you're, he's, we've, they'll, I'd, don't",
    "I'M YOU'RE HE'S WE'VE THEY'LL I'D DON'T", "I'Ll he'S 'S 'T '", "it’s don’t", "''s", "'s", " 's", "'",
    "''", "\"quoted\"", "(a) [b] {c} <d>", "!?.,;:", "...", "…", "?!?!", "--", "—", "1", "12", "123", "1234",
    "12345", "123456789", "3.14159", "1,000,000", "-5", "1e10", "0x1F", "a1b2c3", "1 2 3", "٣٤٥", "१२३", "Ⅳ",
    "½", "x²", "①②③", "１２３", "2024-11-30T12:34:56Z", "+49 (0)30 123456", "$1.00", "€5", "50%", "#1",
    "Hello, world!", "HELLO WORLD", "helloWorld", "HelloWorld", "hello_world", "hello-world", "XMLHttpRequest",
    "iPhone", "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Portez ce vieux whisky au juge blond qui fume.", "naïve café", "nai\u0308ve cafe\u0301",
    "A\u030angstro\u0308m", "Ångström", "\u212b", "ﬁ ﬂ ﬀ", "ǅ ǆ", "ß ẞ", "İi ıI", "Ωμέγα",
    "Жёлтый подъезд", "הַשָּׁלוֹם", "العَرَبِيَّة", "مرحبا بالعالم", "नमस्ते दुनिया", "ক্ষ",
    "தமிழ்", "ไทยภาษา", "ລາວ", "ཀླུ", "မြန်မာ", "ខ្មែរ", "한국어", "\u1112\u1161\u11ab", "日本語テキスト",
    "カタカナ", "ｶﾀｶﾅ", "中文字符", "你好，世界。", "全角！？", "𠮷野家", "𝒜𝓑𝓒", "𐐀𐐨", "ⰀⰁ", "ᏣᎳᎩ", "𓀀𓀁", "😀",
    "😀😀", "👍🏽", "👩‍👩‍👧", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "☎︎", "1️⃣", "a😀b", " 😀 ", "🤷🏻‍♂️ shrug",
    "👨‍👩‍👧‍👦 family", "e\u0301\u0301\u0301", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "\u0301", " \u0301a", "a\u200db", "\u200d", "\u202eabc\u202c", "\u2066x\u2069", "▁", "▁▁", "▁a", " ▁ ",
    "a▁b", "▁ a", "Ġ", "Ċ", "Ġa", "â€™", "Ã©", "<0x0A>", "<0x41>", "<0xZZ>", "##a", "@@",
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "<html><body>hi</body></html>", "https://example.org/a?b=c&d=%20#e", "user@example.org", "C:\\Users\\x",
    "{\"a\": [1, 2.5, null, \"b\\n\"]}", "\\n\\t\\\\", "SELECT * FROM t WHERE a='b';", "| a | b |\n|---|---|\n",
    "- item\n- item\n  - inner\n", "$$\\frac{a}{b}$$", "// comment", "\x00", "a\x00b", "\x01\x02\x1f", "\x7f",
    "\x80\x9f", "\ufffd", "\ufffe", "\uffff", "\U0010ffff", "\ue000", "\U000f0000", "\ud7ff\uf900", "\u0378",
    "\U0001fae8", "\u2e80", "\ua9c1", "\U00016e40",
)  # fmt: skip


def by_category() -> Iterator[str]:
    """A few characters of every category of Unicode, each in several surroundings."""
    draw = random.Random(7)
    members: dict[str, list[str]] = {}
    for point in range(sys.maxunicode + 1):
        members.setdefault(unicodedata.category(chr(point)), []).append(chr(point))
    members.pop("Cs")  # halves of pairs are no text
    for category in sorted(members):
        found = members[category]
        for character in {found[0]: 0, found[-1]: 0, **dict.fromkeys(draw.sample(found, min(3, len(found))), 0)}:
            yield draw.choice(("a{0}b", " {0} ", "{0}{0}1", "x {0}y", "{0}\n", "A{0}", "{0}'s")).format(character)


def special_spelled() -> Iterator[str]:
    """Special tokens in the middle of text, doubled, cut short and in another case."""
    for token in SPECIAL:
        yield from (token, f"a{token}b", f"a {token} b", f"{token}{token}", f"{token}\n  b", token[:-1], token.upper())


AWKWARD: tuple[str, ...] = tuple(dict.fromkeys([*WRITTEN, *by_category(), *special_spelled()]))


def long_runs(length: int) -> tuple[str, ...]:
    """Runs that a merge or a pattern may take the square of their length for."""
    units = ("a", " ", "\n", "é", "1", "!", "漢", "\u0301", "😀", " a", "a ", "\r\n", "ab1 ", "'s", "<", "▁")
    return tuple((unit * length)[:length] for unit in units)


# What tiny tokenizers learn their merges from.
CORPUS: tuple[str, ...] = tuple(each for each in (*WRITTEN * 3, *AWKWARD) if not any(mark in each for mark in SPECIAL))
