"""WordPiece from a folder and from a GGUF: the same ids and texts, and what such a file must have."""

from __future__ import annotations

import json

import pytest

from awkward import AWKWARD
from millpond.errors import ModelFileError
from millpond.text.detokenizer import Detokenizer
from millpond.text.tokenizer import Tokenizer
from tiny_wordpiece import CLS, FAMILIES, PAD, SEP, UNKNOWN, learnt, wordpiece_metadata, write_folder

NAMES = list(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_both_files_give_the_ids_of_the_tokenizer_that_they_were_made_of(name, tmp_path):
    folder, gguf = Tokenizer.from_folder(write_folder(name, tmp_path)), Tokenizer.from_gguf(wordpiece_metadata(name))
    expected = [encoding.ids for encoding in learnt(name).encode_batch_fast(list(AWKWARD), add_special_tokens=False)]
    assert [folder.encode(text, add_special_tokens=False) for text in AWKWARD] == expected
    assert [gguf.encode(text, add_special_tokens=False) for text in AWKWARD] == expected
    assert folder.vocabulary.tokens == gguf.vocabulary.tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_between_its_two_marks_and_a_long_one_is_not_cut(name, tmp_path):
    for tokenizer in (
        Tokenizer.from_folder(write_folder(name, tmp_path)),
        Tokenizer.from_gguf(wordpiece_metadata(name)),
    ):
        found = tokenizer.encode("the cat " * 30)
        assert (found[0], found[-1]) == (CLS, SEP)
        assert found[1:-1] == tokenizer.encode("the cat " * 30, add_special_tokens=False)
        assert len(found) > 50
        assert tokenizer.encode("") == [CLS, SEP]
        assert tokenizer.special_token_ids >= {CLS, SEP, PAD, UNKNOWN}
        assert tokenizer.chat_template is None


def test_a_vocabulary_without_upper_case_makes_a_text_lower_case_without_accents():
    lower, plain = (Tokenizer.from_gguf(wordpiece_metadata(name)) for name in NAMES)
    assert lower.encode("HELLO Café") == lower.encode("hello cafe")
    assert plain.encode("HELLO Café") != plain.encode("hello cafe")


@pytest.mark.parametrize("name", NAMES)
def test_decoding_puts_words_apart_and_their_parts_together(name, tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(name, tmp_path))
    decoder = learnt(name).decoder.__class__(prefix="##", cleanup=False)
    for text in AWKWARD:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens = [tokenizer.vocabulary.tokens[token_id] for token_id in ids]
        assert tokenizer.decode(ids, skip_special_tokens=False) == decoder.decode(tokens)
        streamed = Detokenizer(tokenizer, skip_special_tokens=False)
        assert streamed.push(ids) + streamed.finish() == tokenizer.decode(
            ids, skip_special_tokens=False, continues=True
        )


def test_the_marks_are_found_by_their_usual_names_where_the_file_names_none():
    metadata = wordpiece_metadata(NAMES[0])
    for role in ("cls", "seperator"):
        del metadata[f"tokenizer.ggml.{role}_token_id"]
    assert Tokenizer.from_gguf(metadata).encode("") == [CLS, SEP]
    metadata |= {"tokenizer.ggml.bos_token_id": 7, "tokenizer.ggml.separator_token_id": 8}
    assert Tokenizer.from_gguf(metadata).encode("") == [7, 8]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unknown_token_id": None, "token_type": None}, "needs an unknown token"),
        ({"cls_token_id": 10**6}, r"tokenizer\.ggml\.cls_token_id is 1000000, outside the vocabulary"),
        (
            {"cls_token_id": None, "rename": ("[CLS]", "[cls]")},
            r"no tokenizer\.ggml\.cls_token_id and no token \[CLS\]",
        ),
        ({"rename": ("[MASK]", "[SEP]")}, "tokens 3 and 4 are both"),
    ],
    ids=str,
)
def test_what_a_file_lacks_is_named(changes, said):
    metadata = wordpiece_metadata(NAMES[0])
    before, after = changes.get("rename", ("", ""))
    tokens = [after if token == before else token for token in metadata["tokenizer.ggml.tokens"]]
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()} | {"tokenizer.ggml.tokens": tokens}
    with pytest.raises(ModelFileError, match=said):
        Tokenizer.from_gguf({key: value for key, value in {**metadata, **changed}.items() if value is not None})


def test_another_mark_of_what_goes_on_is_refused(tmp_path):
    folder = write_folder(NAMES[0], tmp_path)
    written = json.loads((folder / "tokenizer.json").read_text())
    written["decoder"]["prefix"] = "@@"
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ModelFileError, match="decodes by WordPiece"):
        Tokenizer.from_folder(folder)
