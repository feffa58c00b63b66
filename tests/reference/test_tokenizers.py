"""Tokenizers held to transformers': ours from a GGUF, theirs from the tokenizer.json of the same vocabulary."""

from __future__ import annotations

import json
import random
import re
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest

from awkward import AWKWARD, SPECIAL
from millpond.load.gguf import open_gguf
from millpond.load.store import resolve
from millpond.text.detokenizer import Detokenizer
from millpond.text.tokenizer import Tokenizer
from tiny_sentencepiece import FAMILIES as PIECES
from tiny_sentencepiece import learnt, sentencepiece_metadata, write_json_folder, write_model_folder
from tiny_tokenizers import BYTE, FAMILIES, byte_level, byte_level_metadata
from tiny_wordpiece import FAMILIES as WORDS
from tiny_wordpiece import wordpiece_metadata
from tiny_wordpiece import write_folder as write_words_folder

pytestmark = pytest.mark.reference


def assert_same(ours: Tokenizer, theirs, texts=AWKWARD) -> None:
    """Both give the same ids for each text, and the same text for ids: of texts, random ones, and cut anywhere."""
    expected = {text: theirs.encode(text, add_special_tokens=False) for text in texts}
    assert {text: ours.encode(text, add_special_tokens=False) for text in texts} == expected
    assert_same_texts(ours, theirs, [*expected.values(), *random_ids(ours), *cut(expected.values())])


def assert_same_texts(ours: Tokenizer, theirs, lists) -> None:
    for skips in (True, False):
        settings = {"skip_special_tokens": skips}
        streams = [streamed(ours, ids, skips) for ids in lists]
        assert streams == [ours.decode(ids, continues=True, **settings) for ids in lists]
        whole = [ids for ids in lists if has_whole_characters(ours, ids, skips)]
        assert len(whole) > 400
        expected = [theirs.decode(ids, clean_up_tokenization_spaces=False, **settings) for ids in whole]
        assert [ours.decode(ids, **settings) for ids in whole] == expected


def has_whole_characters(tokenizer: Tokenizer, token_ids, skips: bool) -> bool:
    """Whether every run of byte tokens is whole characters. Of one that is not, transformers keeps none of them,
    which no stream could do: it would have to wait for the run's end."""
    types = tokenizer.vocabulary.types
    seen = [i for i in token_ids if not (skips and i in tokenizer.special_token_ids)]
    runs = (run for is_byte, run in groupby(seen, key=lambda i: types[i] == BYTE) if is_byte)
    return all("\ufffd" not in b"".join(map(tokenizer.token_bytes, run)).decode(errors="replace") for run in runs)


def streamed(tokenizer: Tokenizer, token_ids, skips: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips)
    return "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.finish()


def random_ids(tokenizer: Tokenizer, count: int = 100):
    draw = random.Random(3)
    return [[draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 20))] for _ in range(count)]


def cut(lists):
    """Sequences that begin and end inside of characters now and then."""
    draw = random.Random(5)
    return [ids[draw.randrange(len(ids)) : draw.randrange(len(ids)) + 1] for ids in lists if len(ids) > 2]


def from_folder(folder: Path, name: str):
    folder.mkdir()
    byte_level(name).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return import_module("transformers").PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_byte_level_tokenizers_are_those_of_transformers(name, tmp_path):
    theirs = from_folder(tmp_path / "folder", name)
    assert_same(Tokenizer.from_gguf(byte_level_metadata(name, tmp_path / "tiny.gguf")), theirs)
    assert_same(Tokenizer.from_folder(tmp_path / "folder"), theirs)


@pytest.mark.parametrize("name", PIECES)
def test_sentencepiece_tokenizers_are_those_of_transformers(name, tmp_path):
    folder = write_json_folder(name, tmp_path / "json")
    theirs = import_module("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    assert_same(Tokenizer.from_gguf(sentencepiece_metadata(name, tmp_path / "tiny.gguf")), theirs)
    assert_same(Tokenizer.from_folder(folder), theirs)
    assert_same(Tokenizer.from_folder(write_model_folder(name, tmp_path / "model")), theirs)


@pytest.mark.parametrize("name", ["llama 2, mistral", "phi 3"])
def test_sentencepiece_tokenizers_are_sentencepieces_own(name, tmp_path):
    ours = Tokenizer.from_folder(write_model_folder(name, tmp_path / "model"))
    theirs = import_module("sentencepiece").SentencePieceProcessor(model_proto=learnt(name))
    texts = [text for text in AWKWARD if not any(mark in text for mark in SPECIAL)]
    assert len(texts) > 300
    assert {text: ours.encode(text, add_special_tokens=False) for text in texts} == {
        text: theirs.encode(text) for text in texts
    }
    for ids in random_ids(ours, 300):
        ids = [i for i in ids if i < theirs.get_piece_size() and i not in ours.special_token_ids]
        # An invalid byte is one U+FFFD there; here, as in Python and Rust, bytes that begin a character are one.
        got, expected = (re.sub("\ufffd+", "\ufffd", text) for text in (ours.decode(ids), theirs.decode(ids)))
        assert got == expected


# Classes of transformers that cut words by rules of their own, whatever a tokenizer.json says.
CLASSES = {
    "GPT2Tokenizer": "gpt 2",
    "GPTNeoXTokenizer": "olmo, gpt neox",
    "Qwen2Tokenizer": "qwen 2, qwen 3",
    "CohereTokenizer": "command r",
}


@pytest.mark.parametrize("kind", CLASSES)
def test_byte_level_tokenizers_are_those_of_their_class_in_transformers(kind, tmp_path):
    written = json.loads(byte_level(CLASSES[kind]).to_str())
    model = written["model"]
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    if kind == "CohereTokenizer":
        roles |= {"cls_token": "<s>", "sep_token": "<s>", "mask_token": "<s>"}
    theirs = getattr(import_module("transformers"), kind)(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], **roles
    )
    for each in written["added_tokens"]:
        token = import_module("tokenizers").AddedToken(each["content"], special=each["special"], normalized=False)
        theirs.add_tokens([token], special_tokens=each["special"])
    assert_same(Tokenizer.from_gguf(byte_level_metadata(CLASSES[kind], tmp_path / "tiny.gguf")), theirs)


@pytest.mark.parametrize("name", ["llama 3", "olmo 2, phi 4", "smollm 3", "phi 4 mini, gpt 4o", "mistral nemo"])
def test_byte_level_tokenizers_are_what_transformers_makes_of_the_same_gguf(name, tmp_path):
    ours = Tokenizer.from_gguf(byte_level_metadata(name, tmp_path / "tiny.gguf"))
    theirs = gguf_tokenizer(tmp_path / "tiny.gguf")
    if FAMILIES[name].ignore_merges:
        theirs.backend_tokenizer.model.ignore_merges = True  # it knows that of no GGUF
    assert_same(ours, theirs)


def gguf_tokenizer(path: Path):
    """Transformers' own reading of a GGUF file's tokenizer."""
    mapping = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    architecture, held, _ = mapping.get_gguf_tokenizer(str(path))
    backend, _ = mapping.convert_gguf_tokenizer(architecture, held)
    return import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("name", WORDS)
def test_wordpiece_tokenizers_are_those_of_transformers(name, tmp_path):
    """Ids alone: their texts have spaces taken from in front of commas and the like, which no stream could do."""
    folder = write_words_folder(name, tmp_path / "folder")
    theirs = import_module("transformers").AutoTokenizer.from_pretrained(folder)
    expected = {text: theirs.encode(text, truncation=False) for text in AWKWARD}
    for ours in (Tokenizer.from_folder(folder), Tokenizer.from_gguf(wordpiece_metadata(name))):
        assert {text: ours.encode(text) for text in AWKWARD} == expected


def test_the_words_of_a_real_model_are_those_of_transformers():
    folder = resolve("all-minilm-l6-v2")
    ours, theirs = Tokenizer.from_folder(folder), import_module("transformers").AutoTokenizer.from_pretrained(folder)
    assert {text: ours.encode(text) for text in AWKWARD} == {text: theirs.encode(text) for text in AWKWARD}


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_vocabularies_of_real_models_are_what_transformers_makes_of_their_files(name):
    path = resolve(name)
    theirs = gguf_tokenizer(path)
    if name == "smollm2":  # transformers does not know how its words are cut
        parts = import_module("tokenizers.pre_tokenizers")
        words = [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
        theirs.backend_tokenizer.pre_tokenizer = parts.Sequence(words)
    assert_same(Tokenizer.from_gguf(open_gguf(path).metadata), theirs)
