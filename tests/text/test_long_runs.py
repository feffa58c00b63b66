"""Runs of one character, 50,000 long, take a time in proportion to their length, however words are cut and merged."""

from __future__ import annotations

import time

import pytest

from millpond.text.pre_tokenizers import WORD_SPLITS
from millpond.text.tokenizer import Tokenizer
from tiny_tokenizers import byte_level_metadata

pytestmark = pytest.mark.slow

LONG, SHORT = 50_000, 10_000
UNITS = ("a", " ", "1", "\u0301", "!", "\r\n")
# In proportion is 5, and a little more for the queue of merges; the square would be 25.
MOST_TIMES_LONGER = 15
ONE_NAME_EACH = sorted({split: name for name, split in sorted(WORD_SPLITS.items(), reverse=True)}.values())


def encoded(tokenizer: Tokenizer, text: str) -> tuple[list[int], float]:
    """A text's tokens, and the seconds of the processor that they took."""
    begin = time.process_time()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return token_ids, time.process_time() - begin


def assert_in_proportion(tokenizer: Tokenizer) -> None:
    for unit in UNITS:
        long, short = ((unit * length)[:length] for length in (LONG, SHORT))
        token_ids, seconds = encoded(tokenizer, long)
        assert seconds < MOST_TIMES_LONGER * min(encoded(tokenizer, short)[1] for _ in range(2)), repr(unit)
        assert tokenizer.decode(token_ids) == long


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    return byte_level_metadata("llama 3", tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.parametrize("pre", ONE_NAME_EACH)
def test_every_way_to_cut_words(pre, metadata):
    assert_in_proportion(Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": pre}))


def test_sentencepiece_where_a_text_is_one_word():
    runs = ["\u2581" * count for count in (1, 2, 4, 8)]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *runs, "a", "aa", "aaaa", "1", "11", "!"]
    scores = [-float(i) for i in range(len(tokens))]
    parts = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": [2, *[6] * 256, *[1] * 10]}
    assert_in_proportion(Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in parts.items()}))
