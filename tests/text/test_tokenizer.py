from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import InvalidRequestError, ModelFileError
from millpond.text.tokenizer import Tokenizer


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_ids_are_those_of_transformers_for_every_awkward_string(pre, smollm2_metadata, golden):
    tokenizer = Tokenizer.from_gguf(smollm2_metadata | {"tokenizer.ggml.pre": pre})
    expected = {case["text"]: case.get(pre, case["smollm"]) for case in golden["encode"]}
    # Without BOS: the demo file asks for none, and the key stays when `pre` is changed.
    assert {text: tokenizer.encode(text) for text in expected} == expected


@pytest.fixture
def without_forced_switches() -> Iterator[None]:
    """A thread keeps the interpreter lock until it gives it away itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_the_awkward_strings_tell_the_ways_to_cut_words_apart(pre, golden):
    assert any(pre in case for case in golden["encode"])


@pytest.mark.parametrize(("skip", "key"), [(True, "skipped"), (False, "kept")])
def test_decoded_text_is_that_of_transformers_for_valid_and_invalid_bytes(skip, key, smollm2, golden):
    for case in golden["decode"]:
        assert smollm2.decode(case["ids"], skip_special_tokens=skip) == case[key]


def test_decoding_the_ids_of_ordinary_text_gives_the_text_back(smollm2, golden):
    lost = "\x04\x06\x13\x14\x16\x1d\U00040000"  # the vocabulary has no tokens for their bytes
    texts = [case["text"] for case in golden["encode"] if not set(case["text"]) & set(lost)]
    assert len(texts) > 200
    assert [smollm2.decode(smollm2.encode(text), skip_special_tokens=False) for text in texts] == texts


@given(text=st.text())
def test_with_all_256_bytes_any_text_survives_the_round_trip(text, tiny):
    assert tiny.decode(tiny.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_a_byte_without_a_token_is_left_out_as_the_reference_does(smollm2):
    assert smollm2.encode("a\x04b") == smollm2.encode("a") + smollm2.encode("b")


def test_the_demo_file_ends_answers_with_the_end_of_a_turn_and_of_a_text_and_adds_no_bos(smollm2):
    assert [smollm2.vocabulary.tokens[i] for i in sorted(smollm2.eos_token_ids)] == ["<|endoftext|>", "<|im_end|>"]
    assert smollm2.bos_token_id == 1
    assert smollm2.encode("Hi") == [26843]
    assert smollm2.vocab_size == 49152


def test_half_a_surrogate_pair_is_the_callers_mistake(tiny):
    with pytest.raises(InvalidRequestError, match=r"U\+D800 at character 2"):
        tiny.encode("ab\ud800")


def test_nul_is_a_character_like_any_other(tiny):
    assert tiny.encode("a\0b", add_special_tokens=False) == [97, 0, 98]


def test_control_and_user_defined_tokens_are_never_split_even_with_spaces_inside(tiny):
    assert tiny.encode("x<tag x></s>y", add_special_tokens=False) == [120, 262, 261, 121]


def test_unused_and_byte_tokens_are_not_found_in_text(tiny_metadata):
    # "llama-bpe" takes a word that is a token whole, so these two would be found if they were in the vocabulary.
    tokens = [*tiny_metadata()["tokenizer.ggml.tokens"][:263], "unused", "<0xE9>"]
    tokenizer = Tokenizer.from_gguf(tiny_metadata(pre="llama-bpe", tokens=tokens))
    assert tokenizer.encode("unused<0xE9>", add_special_tokens=False) == [*b"unused<0xE9>"]


def test_a_word_that_is_a_token_is_taken_whole_only_where_the_model_does_so(tiny_metadata):
    tokens = [*tiny_metadata()["tokenizer.ggml.tokens"], "abc"]
    changes = {"tokens": tokens, "token_type": [*tiny_metadata()["tokenizer.ggml.token_type"], 1]}
    ids = {
        pre: Tokenizer.from_gguf(tiny_metadata(pre=pre, **changes)).encode("abc", add_special_tokens=False)
        for pre in ("llama-bpe", "gpt-2")
    }
    assert ids == {"llama-bpe": [265], "gpt-2": [97, 98, 99]}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", [b"1", b"2", b"3", b"4"]),
        ("qwen2", [b"1", b"2", b"3", b"4"]),
        ("llama-bpe", [b"123", b"4"]),
        ("gpt-2", [b"1234"]),
    ],
)
def test_digits_are_kept_together_as_the_model_does_even_where_merges_would_join_more(pre, pieces, tiny_metadata):
    before = tiny_metadata()
    tokenizer = Tokenizer.from_gguf(
        tiny_metadata(
            pre=pre,
            tokens=[*before["tokenizer.ggml.tokens"], "12", "123", "1234"],
            token_type=[*before["tokenizer.ggml.token_type"], 1, 1, 1],
            merges=["1 2", "12 3", "123 4"],
        )
    )
    assert [tokenizer.token_bytes(each) for each in tokenizer.encode("1234", add_special_tokens=False)] == pieces


@pytest.mark.parametrize(("adds", "expected"), [(True, [260, 259]), (False, [259]), (None, [259])])
def test_bos_is_added_when_the_file_says_so(adds, expected, tiny_metadata):
    assert Tokenizer.from_gguf(tiny_metadata(add_bos_token=adds)).encode("hello") == expected


def test_a_llama_3_file_that_does_not_say_adds_bos(tiny_metadata):
    tokenizer = Tokenizer.from_gguf(tiny_metadata(pre="llama-bpe", add_bos_token=None))
    assert tokenizer.encode("hello") == [260, 259]


def test_text_of_a_chat_template_gets_no_second_bos(tiny):
    assert tiny.encode("<s>hello", add_special_tokens=False) == [260, 259]


def test_a_prompt_that_starts_with_bos_gets_no_second_one(tiny):
    assert tiny.encode("<s>hello") == [260, 259]
    assert tiny.encode("<s><s>hello") == [260, 260, 259]


def test_eos_is_added_when_the_file_says_so_and_never_twice(tiny_metadata):
    tokenizer = Tokenizer.from_gguf(tiny_metadata(add_eos_token=True))
    assert tokenizer.encode("hello") == tokenizer.encode("hello</s>") == [260, 259, 261]
    assert tokenizer.encode("<s>hello</s></s>") == [260, 259, 261, 261]


def test_adding_a_bos_that_the_file_does_not_name_is_refused(tiny_metadata):
    with pytest.raises(ModelFileError, match="add_bos_token is true"):
        Tokenizer.from_gguf(tiny_metadata(bos_token_id=None))


def test_a_model_without_bos_encodes_nothing_to_nothing(smollm2):
    assert smollm2.encode("") == []


def test_all_ends_that_the_file_names_end_an_answer(tiny_metadata):
    assert Tokenizer.from_gguf(tiny_metadata(eot_token_id=260, eom_token_id=262)).eos_token_ids == {260, 261, 262}


def test_a_file_without_ends_has_none(tiny_metadata):
    assert Tokenizer.from_gguf(tiny_metadata(eos_token_id=None)).eos_token_ids == frozenset()


def renamed(tiny_metadata, **names):
    """The tiny vocabulary with other texts for <s> (260), </s> (261) and <tag x> (262, user-defined)."""
    old = {"<s>": names.get("bos"), "</s>": names.get("eos"), "<tag x>": names.get("tag")}
    return [old.get(token) or token for token in tiny_metadata()["tokenizer.ggml.tokens"]]


def test_a_special_token_that_everybody_takes_as_an_end_ends_an_answer_though_no_field_names_it(tiny_metadata):
    tokens = renamed(tiny_metadata, bos="<|eot_id|>")
    assert Tokenizer.from_gguf(tiny_metadata(tokens=tokens)).eos_token_ids == {260, 261}


def test_a_token_that_is_not_special_ends_nothing_by_its_name(tiny_metadata):
    tokens = renamed(tiny_metadata, tag="<|eot_id|>")
    assert Tokenizer.from_gguf(tiny_metadata(tokens=tokens)).eos_token_ids == {261}


def test_what_ends_a_part_of_an_answer_does_not_end_the_answer(tiny_metadata):
    tokens = renamed(tiny_metadata, bos="<|end|>", eos="<|return|>", tag="<|call|>")
    types = [1] * 260 + [3, 3, 3, 5, 6]
    assert Tokenizer.from_gguf(tiny_metadata(tokens=tokens, token_type=types)).eos_token_ids == {261, 262}
    assert Tokenizer.from_gguf(tiny_metadata(tokens=tokens)).eos_token_ids == {260, 261}


def test_named_ends_are_special_though_their_type_says_otherwise(tiny_metadata):
    tokenizer = Tokenizer.from_gguf(tiny_metadata(token_type=None))
    assert tokenizer.special_token_ids == {260, 261}
    assert tokenizer.encode("a</s>", add_special_tokens=False) == [97, 261]
    assert tokenizer.decode([97, 261]) == "a"


def test_token_bytes_are_the_true_bytes(tiny):
    assert [tiny.token_bytes(token_id) for token_id in (0, 10, 0xE9, 259, 261, 262, 263, 264)] == [
        b"\x00", b"\n", b"\xe9", b"hello", b"</s>", b"<tag x>", b"", b"\xe9",
    ]  # fmt: skip


def test_a_token_outside_the_byte_alphabet_stands_for_its_own_text(tiny_metadata):
    tokens = ["a b" if token == "<tag x>" else token for token in tiny_metadata()["tokenizer.ggml.tokens"]]
    tokenizer = Tokenizer.from_gguf(tiny_metadata(tokens=tokens, token_type=[1] * 265))
    assert tokenizer.token_bytes(262) == b"a b"


@pytest.mark.parametrize("token_id", [-1, 265, 2**31])
def test_an_id_outside_the_vocabulary_is_refused_with_the_limits(token_id, tiny):
    with pytest.raises(InvalidRequestError, match=f"token id {token_id} .* 0 to 264"):
        tiny.decode([token_id])


def test_special_tokens_are_texts_for_the_chat_template(tiny_metadata):
    tokenizer = Tokenizer.from_gguf(tiny_metadata(padding_token_id=261, unknown_token_id=260))
    assert tokenizer.special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<s>",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["default", None])
def test_a_file_that_does_not_say_how_to_cut_words_gets_gpt_2s_way_and_a_loud_warning(name, tiny_metadata, caplog):
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_gguf(tiny_metadata(pre=name))
    assert "cutting them as GPT-2 does" in caplog.text


def test_a_file_that_says_how_to_cut_words_gets_no_warning(tiny_metadata, caplog):
    Tokenizer.from_gguf(tiny_metadata())
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "afmoe"}, "'afmoe'.*among them gpt-2"),
        ({"model": "rwkv"}, "'rwkv', which is not supported .*'bert' is WordPiece"),
        ({"model": None}, "carries no tokenizer"),
        ({"add_space_prefix": True}, "add_space_prefix is not supported"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name(changes, message, tiny_metadata):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(tiny_metadata(**changes))


def test_a_chat_template_that_is_no_text_is_refused(tiny_metadata):
    with pytest.raises(ModelFileError, match=r"tokenizer\.chat_template must be a string"):
        Tokenizer.from_gguf(tiny_metadata() | {"tokenizer.chat_template": 7})


def test_threads_that_encode_at_once_get_what_they_get_alone(smollm2, golden):
    texts = [case["text"] for case in golden["encode"]] * 4
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(smollm2.encode, texts))
    assert together == [smollm2.encode(text) for text in texts]


def test_other_threads_run_while_a_long_text_is_encoded(smollm2, without_forced_switches):
    text = "The quick brown fox jumps over 13 lazy dogs. " * 10_000
    turns, done, during = [0], threading.Event(), []

    def encode() -> None:
        before = turns[0]
        smollm2.encode(text)
        during.append(turns[0] - before)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(1e-6):
        turns[0] += 1
    thread.join()
    assert during[0] > 0
