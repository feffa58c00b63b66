from __future__ import annotations

import pytest

from millpond.errors import ModelFileError
from millpond.text.vocabulary import BYTE_OF, read_vocabulary


def test_the_byte_alphabet_is_a_character_for_each_byte():
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert (BYTE_OF["A"], BYTE_OF["Ġ"], BYTE_OF["Ċ"], BYTE_OF["Ń"]) == (0x41, 0x20, 0x0A, 0xAD)


def test_token_types_decide_what_is_found_in_text_and_what_is_added(tiny_metadata):
    vocabulary = read_vocabulary(tiny_metadata())
    assert vocabulary.added_ids() == [260, 261, 262]
    assert set(vocabulary.tokens) - vocabulary.bpe_ids().keys() == {"[PAD7]", "<0xE9>"}


def test_empty_tokens_are_never_found_in_text(tiny_metadata):
    tokens = ["" if token == "<tag x>" else token for token in tiny_metadata()["tokenizer.ggml.tokens"]]
    assert "" not in read_vocabulary(tiny_metadata(tokens=tokens)).bpe_ids()


def test_several_tokens_may_be_empty(tiny_metadata):
    tokens = ["" if token in ("<tag x>", "[PAD7]") else token for token in tiny_metadata()["tokenizer.ggml.tokens"]]
    assert read_vocabulary(tiny_metadata(tokens=tokens)).token_bytes(262) == b""


def changed(metadata: dict, key: str, index: int, value: object) -> dict:
    items = list(metadata[f"tokenizer.ggml.{key}"])
    items[index] = value
    return metadata | {f"tokenizer.ggml.{key}": items}


@pytest.mark.parametrize(
    ("key", "index", "value", "message"),
    [
        ("tokens", 7, "a", "tokens 7 and 97 are both 'a'"),
        ("tokens", 7, 7, r"tokens must be a list of strings"),
        ("tokens", 264, "<0xG0>", "token 264 is a byte token but reads '<0xG0>'"),
        ("merges", 1, "l", "merge 1 is 'l', not two tokens"),
        ("merges", 1, "l l l", "merge 1 is 'l l l', not two tokens"),
        ("merges", 1, "l z", "merge 1 needs the token 'lz'"),
        ("merges", 1, "qq l", "merge 1 needs the token 'qq'"),
        ("merges", 1, "l ", "merge 1 needs the token ''"),
        ("token_type", 3, 9, "holds 9, which is no token type"),
        ("token_type", 3, "x", "must be a list of integers"),
    ],
)
def test_a_list_with_one_wrong_entry_is_refused_by_its_place(key, index, value, message, tiny_metadata):
    with pytest.raises(ModelFileError, match=message):
        read_vocabulary(changed(tiny_metadata(), key, index, value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"tokens": 5}, "tokens must be a list of strings"),
        ({"merges": "h e"}, "merges must be a list of strings"),
        ({"token_type": 5}, "token_type must be a list of integers"),
        ({"token_type": [1, 1]}, "2 entries for 265 tokens"),
        ({"bos_token_id": 265}, "bos_token_id is 265, outside the vocabulary of 265 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1, outside"),
        ({"eot_token_id": 2**32 - 1}, "eot_token_id is 4294967295, outside"),
        ({"eom_token_id": "</s>"}, "eom_token_id must be an integer"),
    ],
)
def test_metadata_that_cannot_be_right_is_refused_by_key(changes, message, tiny_metadata):
    with pytest.raises(ModelFileError, match=message):
        read_vocabulary(tiny_metadata(**changes))
