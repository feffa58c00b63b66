"""Tokenizers of folders: what each file beside tokenizer.json or tokenizer.model decides, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from millpond.errors import InvalidRequestError, ModelFileError
from millpond.text.tokenizer import Tokenizer
from tiny_tokenizers import SPECIAL, byte_level

IDS = {token: token_id for token_id, token in enumerate(SPECIAL)}
NO_TABLE = {"type": "Precompiled", "precompiled_charsmap": ""}
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}


@pytest.fixture
def write(tmp_path):
    """A folder with the tiny tokenizer, and files of JSON or text by their names."""

    def written(backend: Backend | None = None, **files: object) -> Path:
        (backend or byte_level("llama 3")).save(str(tmp_path / "tokenizer.json"))
        for name, content in {"tokenizer_config": SETTINGS, **files}.items():
            text = content if isinstance(content, str) else json.dumps(content)
            path = tmp_path / (name if "." in name else f"{name}.json")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return written


def copy() -> Backend:
    return Backend.from_str(byte_level("llama 3").to_str())


def with_ends(single: list[str]) -> Backend:
    """The tiny tokenizer with a post-processor that puts tokens around a text."""
    backend = copy()
    special = [(token, IDS[token]) for token in single if token in IDS]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return backend


def test_roles_and_special_tokens_are_those_of_the_settings(write):
    tokenizer = Tokenizer.from_folder(write())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.special_token_ids == set(IDS.values())
    assert tokenizer.decode(tokenizer.encode("a<think>b</s>")) == "a<think>b"


def test_the_ends_are_all_of_the_generation_config_and_the_tokenizers_own(write):
    assert Tokenizer.from_folder(write(generation_config={"eos_token_id": [5, 6]})).eos_token_ids == {2, 5, 6}
    assert Tokenizer.from_folder(write(generation_config={"eos_token_id": 3})).eos_token_ids == {2, 3}


def test_a_generation_config_wins_over_the_config(write):
    folder = write(generation_config={"eos_token_id": 3}, config={"eos_token_id": 6})
    assert Tokenizer.from_folder(folder).eos_token_ids == {2, 3}


def test_without_a_generation_config_the_config_names_the_ends(write):
    assert Tokenizer.from_folder(write(config={"eos_token_id": [6]})).eos_token_ids == {2, 6}


def test_where_no_file_names_ends_they_are_the_usual_special_tokens(write):
    usual = {IDS[token] for token in ("<|endoftext|>", "<|im_end|>", "<|eot_id|>")}
    assert Tokenizer.from_folder(write(config={})).eos_token_ids == usual | {2}


@pytest.mark.parametrize("wrong", [5000, -1, "2", 2.0, [2, None], True])
def test_an_end_that_is_no_token_is_refused_with_the_file_and_the_number_of_tokens(wrong, write):
    with pytest.raises(ModelFileError, match=r"generation_config\.json: eos_token_id holds .* 1202 tokens"):
        Tokenizer.from_folder(write(generation_config={"eos_token_id": wrong}))


@pytest.mark.parametrize(
    ("single", "expected"),
    [
        (["<s>", "$A"], [1, 66]),
        (["$A", "</s>"], [66, 2]),
        (["<s>", "$A", "</s>"], [1, 66, 2]),
        (["<s>", "<|im_start|>", "$A"], [1, 4, 66]),
        (["$A"], [66]),
    ],
)
def test_what_goes_around_a_text_is_what_the_post_processor_says_and_is_never_doubled(single, expected, write):
    tokenizer = Tokenizer.from_folder(write(with_ends(single), tokenizer_config={**SETTINGS, "add_bos_token": True}))
    a = tokenizer.encode("a", add_special_tokens=False)
    assert len(a) == 1
    assert tokenizer.encode("a") == [a[0] if each == 66 else each for each in expected]
    whole = tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False)
    assert tokenizer.encode(whole) == tokenizer.encode("a")


def test_without_a_post_processor_the_settings_say_what_goes_around_a_text(write):
    bare = Tokenizer.from_folder(write()).encode("a")
    asking = {**SETTINGS, "add_bos_token": True, "add_eos_token": True}
    assert Tokenizer.from_folder(write(tokenizer_config=asking)).encode("a") == [1, *bare, 2]


def test_tokens_that_only_the_settings_add_are_found_in_text(write):
    size = byte_level("llama 3").get_vocab_size()
    added = {str(size): {"content": "<tool>", "special": True}, str(size + 1): {"content": "<x>", "rstrip": True}}
    tokenizer = Tokenizer.from_folder(write(tokenizer_config={**SETTINGS, "added_tokens_decoder": added}))
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode("<tool><x>  a") == [size, size + 1, *tokenizer.encode("a")]
    assert tokenizer.decode([size, size + 1]) == "<x>"


def test_a_token_that_the_settings_add_at_another_id_is_refused(write):
    added = {"1500": {"content": "<tool>", "special": True}}
    with pytest.raises(ModelFileError, match=r"adds '<tool>' as 1500, but .* makes it 1202"):
        Tokenizer.from_folder(write(tokenizer_config={**SETTINGS, "added_tokens_decoder": added}))


def test_a_role_whose_token_is_only_ordinary_in_the_vocabulary_is_special(write):
    tokenizer = Tokenizer.from_folder(write(tokenizer_config={**SETTINGS, "pad_token": "!"}))
    (mark,) = tokenizer.encode("!")
    assert mark in tokenizer.special_token_ids
    assert "!" not in Tokenizer.from_folder(write()).special_tokens.values()


def test_cutting_and_padding_that_the_file_asks_for_are_left_out(write):
    backend = copy()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    text = "a b c d e"
    assert Tokenizer.from_folder(write(backend)).encode(text) == byte_level("llama 3").encode(text).ids
    assert len(byte_level("llama 3").encode(text).ids) > 2


NAMED = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "t"}]
NO_ID, NO_TEXT = {"x": {"content": "a"}}, {"7": {"content": ""}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        ({"tokenizer_config": {"chat_template": "a"}}, {"default": "a"}),
        ({"tokenizer_config": {"chat_template": "a"}, "chat_template.jinja": "b"}, {"default": "b"}),
        ({"tokenizer_config": {"chat_template": "a"}, "chat_template": {"chat_template": "c"}}, {"default": "c"}),
        ({"tokenizer_config": {"chat_template": NAMED}}, {"default": "a", "tool_use": "t"}),
        (
            {"chat_template.jinja": "b", "additional_chat_templates/tool_use.jinja": "t"},
            {"default": "b", "tool_use": "t"},
        ),
    ],
)  # fmt: skip
def test_chat_templates_are_taken_from_where_they_may_be(files, expected, write):
    assert Tokenizer.from_folder(write(**files)).source.templates == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": "{"}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config": []}, r"tokenizer_config\.json must be an object, got list"),
        ({"tokenizer_config": {"bos_token": 7}}, r"bos_token must be a string, got 7"),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, r"added_tokens_decoder must be an object"),
        ({"tokenizer_config": {"added_tokens_decoder": NO_ID}}, r"added_tokens_decoder has .* as 'x'"),
        ({"tokenizer_config": {"added_tokens_decoder": NO_TEXT}}, r"added_tokens_decoder has .* as '7'"),
        ({"tokenizer_config": {"chat_template": 7}}, r"chat_template must be text or a list of named templates, got 7"),
        ({"tokenizer_config": {"chat_template": [{"name": "a"}]}}, r"chat_template must be text or a list"),
        ({"generation_config": "[" * 100_000}, r"generation_config\.json is not JSON"),
        ({"tokenizer": "{}"}, r"tokenizer\.json cannot be read"),
        ({"tokenizer": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'}, r"cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_by_its_name(files, message, write):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_folder(write(**files))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda written: written.update(normalizer=NO_TABLE),
            "cannot be read",
        ),
        (lambda written: written.update(pre_tokenizer={"type": "Nothing"}), "cannot be read"),
        (
            lambda written: written.update(
                model={"type": "WordLevel", "vocab": {token: i for i, token in enumerate(IDS)}, "unk_token": "<none>"},
                post_processor=None,
            ),
            "no text can be encoded",
        ),
    ],
)
def test_a_tokenizer_that_the_library_fails_at_is_refused_and_no_panic_gets_out(write, change, message):
    written = json.loads(copy().to_str())
    change(written)
    folder = write()
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_folder(folder)


def test_a_text_that_the_library_panics_at_is_the_askers_error(write):
    written = json.loads(copy().to_str())
    split = {"type": "Split", "pattern": {"Regex": "(z+)+$x"}, "behavior": "Isolated", "invert": False}
    written["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, written["pre_tokenizer"]]}
    folder = write()
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(InvalidRequestError, match="the model's tokenizer cannot encode this text"):
        tokenizer.encode("z" * 60 + "y")


def test_an_empty_template_is_refused(write):
    folder = write()
    (folder / "chat_template.jinja").write_text(" \n")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja is empty"):
        Tokenizer.from_folder(folder)


def test_a_folder_without_a_tokenizer_says_what_it_lacks(tmp_path):
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json and no tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_of_another_kind_is_refused_by_its_decoder(write):
    written = json.loads(byte_level("llama 3").to_str())
    written["decoder"] = {"type": "CTC", "pad_token": "<s>", "word_delimiter_token": "|", "cleanup": True}
    with pytest.raises(ModelFileError, match=r"tokenizer\.json decodes by CTC; only byte-level, SentencePiece and"):
        Tokenizer.from_folder(write(tokenizer=written))


def test_a_vocabulary_with_an_id_far_beyond_its_size_is_refused(write):
    backend = json.loads(byte_level("llama 3").to_str())
    backend["model"]["vocab"]["zzz"] = 2**31
    with pytest.raises(ModelFileError, match=r"an id 2147483648 among 1203 tokens"):
        Tokenizer.from_folder(write(tokenizer=backend))


def test_ids_that_are_missing_are_no_tokens(write):
    backend = json.loads(byte_level("llama 3").to_str())
    backend["model"]["vocab"]["zzz"] = 1300
    tokenizer = Tokenizer.from_folder(write(tokenizer=backend))
    assert tokenizer.vocab_size == 1301
    assert tokenizer.decode([1299, *tokenizer.encode("a"), 1250]) == "a"
