"""SentencePiece vocabularies made by hand, without the library: as a GGUF's metadata and as tokenizer.model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.step import TokenScore
from millpond.errors import ModelFileError
from millpond.serve.logprobs import CompletionLogprobs, TokenNames
from millpond.text.backends import implied_merges
from millpond.text.detokenizer import Detokenizer
from millpond.text.sentencepiece_model import read_sentencepiece_model
from millpond.text.tokenizer import Tokenizer
from millpond.text.vocabulary import Spelling, Vocabulary
from protobuf_writer import field

UNKNOWN, NORMAL, CONTROL, USER, BYTE = 2, 1, 3, 4, 6
WORDS = ("▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "wo", "▁w", "▁wo")
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<tag>", "  "]
TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS), USER, USER]
SCORES = [0.0] * 259 + [-10.0 + i for i in range(len(WORDS))] + [-1000.0, -1000.0]
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}


def metadata(**changes: object) -> dict[str, object]:
    """Keys are without `tokenizer.ggml.`; a change of None takes the key away."""
    known = {
        "model": "llama",
        "tokens": TOKENS,
        "token_type": TYPES,
        "scores": SCORES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (known | changes).items() if value is not None}


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_gguf(metadata())


def named(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer.vocabulary.tokens[i] for i in tokenizer.encode(text, **options)]


def test_the_highest_score_is_merged_first_and_a_space_goes_in_front(tiny):
    assert named(tiny, "hello") == ["<s>", "▁hello"]
    assert named(tiny, "hello wo") == ["<s>", "▁hello", "▁wo"]
    assert named(tiny, "ell", add_special_tokens=False) == ["▁", "e", "ll"]


def test_what_has_no_piece_falls_back_to_its_bytes(tiny):
    assert named(tiny, "éo", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>", "o"]


def test_without_bytes_what_has_no_piece_is_unknown_once():
    kept = [i for i, kind in enumerate(TYPES) if kind != BYTE]
    parts = {"tokens": [TOKENS[i] for i in kept], "token_type": [TYPES[i] for i in kept]}
    tokenizer = Tokenizer.from_gguf(metadata(**parts, scores=[SCORES[i] for i in kept]))
    assert named(tokenizer, "oéåo", add_special_tokens=False) == ["▁", "o", "<unk>", "o"]


def test_no_space_goes_in_front_where_the_file_says_so():
    tokenizer = Tokenizer.from_gguf(metadata(add_space_prefix=False))
    assert named(tokenizer, "hello") == ["<s>", "hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_a_run_of_spaces_that_is_a_token_is_found_before_words(tiny):
    assert named(tiny, "a  hello", add_special_tokens=False) == ["▁", "<0x61>", "  ", "hello"]


def test_every_piece_of_text_between_special_tokens_gets_its_space_as_in_the_models_own_files(tiny):
    assert named(tiny, "<s>hello<tag>hello</s>") == ["<s>", "▁hello", "<tag>", "▁hello", "</s>"]


@pytest.mark.parametrize(
    ("flags", "begin"), [({}, ["<s>"]), ({"add_bos_token": False}, []), ({"add_bos_token": True}, ["<s>"])]
)
def test_bos_is_added_unless_the_file_says_no(flags, begin):
    assert named(Tokenizer.from_gguf(metadata(**flags)), "wo") == [*begin, "▁wo"]


def test_decoding_takes_the_space_in_front_away_but_an_answer_that_goes_on_keeps_its_own(tiny):
    ids = tiny.encode("hello wo")
    assert tiny.decode(ids) == "hello wo"
    assert tiny.decode(ids, continues=True) == " hello wo"
    assert tiny.decode(ids, skip_special_tokens=False) == "<s> hello wo"
    assert Detokenizer(tiny).push(ids) == " hello wo"


@given(text=st.text())
def test_any_text_survives_the_round_trip(text, tiny):
    assert tiny.decode(tiny.encode(text, add_special_tokens=False), skip_special_tokens=False) == text.replace("▁", " ")


@given(ids=st.lists(st.integers(0, len(TOKENS) - 1), max_size=30), skips=st.booleans())
def test_deltas_join_to_the_decode_of_a_text_that_goes_on(ids, skips, tiny):
    detokenizer = Detokenizer(tiny, skip_special_tokens=skips)
    deltas = [detokenizer.push([each]) for each in ids] + [detokenizer.finish()]
    assert "".join(deltas) == tiny.decode(ids, skip_special_tokens=skips, continues=True)


def test_phi_3s_special_tokens_take_the_whitespace_behind_them_along():
    tokens = [*TOKENS, "<|user|>", "<|endoftext|>"]
    phi = {"tokens": tokens, "token_type": [*TYPES, CONTROL, CONTROL], "scores": [*SCORES, 0.0, 0.0]}
    texts = ("<|user|>\n hello", "<|endoftext|>\nhello", "</s> hello")
    plain, stripping = (
        Tokenizer.from_gguf(metadata(**phi) | {"general.architecture": architecture})
        for architecture in ("llama", "phi3")
    )
    assert [named(stripping, text, add_special_tokens=False) for text in texts] == [
        ["<|user|>", "▁hello"], ["<|endoftext|>", "▁", "<0x0A>", "hello"], ["</s>", "▁hello"],
    ]  # fmt: skip
    assert named(plain, texts[0], add_special_tokens=False) == ["<|user|>", "▁", "<0x0A>", "▁hello"]


def merges_of(**scored: float) -> list[tuple[str, str]]:
    tokens = tuple(scored)
    return implied_merges(Vocabulary(tokens, (NORMAL,) * len(tokens), (), {}, Spelling.SPACES, tuple(scored.values())))


def test_merges_are_in_order_of_their_scores_and_of_equal_ones_the_longest_parts_come_first():
    assert merges_of(a=0, b=0, ab=-2, ba=-1) == [("b", "a"), ("a", "b")]
    assert merges_of(a=0, aa=-1, aaa=-2) == [("a", "a"), ("aa", "a"), ("a", "aa")]
    assert merges_of(a=0, b=0, ab=-1, aba=-1, c=0, abac=-1)[0] == ("aba", "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, r"no tokenizer\.ggml\.scores"),
        ({"scores": [1.0]}, f"scores has 1 entries for {len(TOKENS)} tokens"),
        ({"scores": ["x"] * len(TOKENS)}, "scores must be a list of numbers"),
        ({"scores": [float("nan"), *SCORES[1:]]}, "holds nan for token 0"),
        ({"precompiled_charsmap": ["x"]}, "precompiled_charsmap must be a list of bytes"),
        ({"precompiled_charsmap": [255] * 9}, "table of characters .* is damaged"),
        ({"tokens": [*TOKENS[:-1], "hello"]}, "both 'hello'"),
    ],
)
def test_a_vocabulary_that_cannot_be_right_is_refused(changes, message):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(metadata(**changes))


# tokenizer.model: a protocol buffer, written by hand (protobuf_writer.py).


def model_file(
    trainer: Mapping[int, int] | None = None, normalizer: Sequence[bytes] = (), pieces: int = len(TOKENS)
) -> bytes:
    held = zip(TOKENS[:pieces], SCORES, TYPES, strict=False)
    parts = [field(1, field(1, t.replace(" ", "▁").encode()) + field(2, s) + field(3, k)) for t, s, k in held]
    settings = {3: 2, 35: 1, 40: 0, 41: 1, 42: 2, 43: -1} | dict(trainer or {})
    parts.append(field(2, b"".join(field(number, value) for number, value in settings.items())))
    parts.append(field(3, field(1, b"identity") + field(4, 0) + b"".join(normalizer)))
    return b"".join(parts)


@pytest.fixture
def folder(tmp_path):
    def written(model: bytes, **settings: object):
        (tmp_path / "tokenizer.model").write_bytes(model)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    return written


TEXTS = ["", "hello", " hello  wo", "éo", "<s>hello</s>", "a<tag>b", "ell  \n"]


def test_a_tokenizer_model_encodes_as_the_gguf_of_it(folder, tiny):
    tokenizer = Tokenizer.from_folder(folder(model_file()))
    assert [tokenizer.encode(text) for text in TEXTS] == [tiny.encode(text) for text in TEXTS]
    assert tokenizer.special_tokens == tiny.special_tokens
    assert tokenizer.eos_token_ids == tiny.eos_token_ids == {2}


def test_a_tokenizer_model_says_whether_a_space_goes_in_front(folder):
    tokenizer = Tokenizer.from_folder(folder(model_file(normalizer=[field(3, 0)])))
    assert named(tokenizer, "hello") == ["<s>", "hello"]


def test_a_tokenizer_model_says_whether_spaces_are_left_out(folder):
    tokenizer = Tokenizer.from_folder(folder(model_file(normalizer=[field(4, 1)])))
    assert named(tokenizer, "  hello   wo ") == ["<s>", "▁hello", "▁wo"]


def test_the_settings_rename_and_add_tokens(folder):
    more = {"1": {"content": "<begin>", "special": True}, str(len(TOKENS)): {"content": "<end>", "special": True}}
    settings = {"added_tokens_decoder": more, "bos_token": "<begin>", "eos_token": "<end>", "add_eos_token": True}
    tokenizer = Tokenizer.from_folder(folder(model_file(), **settings))
    assert named(tokenizer, "hello") == ["<begin>", "▁hello", "<end>"]
    assert tokenizer.eos_token_ids == {len(TOKENS)}


def test_a_gap_before_an_added_token_is_refused(folder):
    more = {str(len(TOKENS) + 1): {"content": "<end>"}}
    with pytest.raises(ModelFileError, match=f"adds '<end>' as {len(TOKENS) + 1}, after {len(TOKENS)} tokens"):
        Tokenizer.from_folder(folder(model_file(), added_tokens_decoder=more))


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_vocabulary_of_more_bytes_than_any_has_is_refused_before_it_is_read(folder, name):
    place = folder(model_file())
    with (place / name).open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(ModelFileError, match=rf"^{name} has 8589934592 bytes, and may have 268435456"):
        Tokenizer.from_folder(place)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (b"", "has no pieces"),
        (model_file({3: 3}), r"model type 3; only 1 \(unigram\) and 2 \(BPE\)"),
        (model_file({24: 1}), "treat_whitespace_as_suffix"),
        (model_file(normalizer=[field(5, 0)]), "escape_whitespaces is off"),
        (field(1, field(1, b"\xff")), "is no SentencePiece model, or cut"),
        (field(1, field(1, b"a") + field(3, 9)), "piece 0 is of type 9"),
        (b"\x0a\xff\xff\xff\xff\x0f", "field 1 takes 4294967295 bytes, 0 are left"),
        (b"\x0b", "written in way 3"),
        (b"\x80" * 20, "has no end"),
        (b"PK\x03\x04 a zip", "is no SentencePiece model, or cut"),
    ],
)
def test_a_file_that_is_no_model_is_refused(model, message, folder):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_folder(folder(model))


def outcome(path) -> str:
    try:
        return "read" if read_sentencepiece_model(path).pieces else "empty"
    except ModelFileError as error:
        return str(error)


@given(end=st.integers(0, len(model_file()) - 1), change=st.integers(0, 255))
def test_a_model_that_is_cut_or_changed_anywhere_is_read_or_refused(end, change, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tokenizer.model"
    whole = model_file()
    for data in (whole[:end], whole[:end] + bytes([change]) + whole[end + 1 :]):
        path.write_bytes(data)
        assert (told := outcome(path)) == "read" or "tokenizer.model" in told


def test_the_offsets_of_an_echoed_prompt_are_places_in_its_text(tiny):
    prompt, output = tiny.encode("hello wo"), [IDS["▁wo"], IDS["r"]]
    scores = [TokenScore(each, -1.0, 1, ()) for each in (*prompt[1:], *output)]
    shown = CompletionLogprobs(TokenNames(tiny, skip_special_tokens=True))
    offsets = shown.prompt(prompt, scores[: len(prompt) - 1], 0)["text_offset"]
    offsets += shown.output(scores[len(prompt) - 1 :])["text_offset"]
    text = tiny.decode(prompt) + tiny.decode(output, continues=True)
    assert (text, offsets) == ("hello wo wor", [0, 0, 5, 8, 11])
