from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import InvalidRequestError
from millpond.text.detokenizer import Detokenizer

CUT = "\ufffd"
# Mostly bytes above 0x7F, so that characters are made and broken all the time, and every other type of token.
AWKWARD_IDS = st.lists(st.one_of(st.integers(0x80, 0xFF), st.integers(0, 264)), max_size=40)
TEXTS = ["Hello, world!", "naïve café", "你好，世界", "👩‍👩‍👧 family 🇩🇪", "नमस्ते", "e\u0301", "\0\n\t", "𝒜𠮷"]


def pushed_singly(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [detokenizer.push([token_id]) for token_id in token_ids]


@given(token_ids=AWKWARD_IDS, skip=st.booleans())
def test_deltas_join_to_the_full_decode(token_ids, skip, tiny):
    detokenizer = Detokenizer(tiny, skip_special_tokens=skip)
    deltas = pushed_singly(detokenizer, token_ids)
    assert "".join(deltas) + detokenizer.finish() == tiny.decode(token_ids, skip_special_tokens=skip)


@given(token_ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_deltas_join_to_the_full_decode_with_the_demo_vocabulary(token_ids, skip, smollm2):
    detokenizer = Detokenizer(smollm2, skip_special_tokens=skip)
    deltas = pushed_singly(detokenizer, token_ids)
    assert "".join(deltas) + detokenizer.finish() == smollm2.decode(token_ids, skip_special_tokens=skip)


@given(token_ids=AWKWARD_IDS, cuts=st.lists(st.integers(0, 40)))
def test_several_tokens_at_once_give_the_same_text(token_ids, cuts, tiny):
    edges = [0, *sorted(cuts), len(token_ids)]
    detokenizer = Detokenizer(tiny)
    text = "".join(detokenizer.push(token_ids[a:b]) for a, b in pairwise(edges))
    assert text + detokenizer.finish() == tiny.decode(token_ids)


@given(token_ids=AWKWARD_IDS)
def test_a_token_alone_has_a_text_where_its_bytes_are_whole_characters(token_ids, tiny):
    for token_id in token_ids:
        decoded = tiny.decode([token_id], skip_special_tokens=False)
        assert tiny.whole_text(token_id) == (None if CUT in decoded else decoded)


@given(token_ids=AWKWARD_IDS)
def test_after_every_token_at_most_three_bytes_of_no_character_are_held_back(token_ids, tiny):
    detokenizer = Detokenizer(tiny)
    text = ""
    for count, token_id in enumerate(token_ids, start=1):
        text += detokenizer.push([token_id])
        assert tiny.decode(token_ids[:count]) in (text, text + CUT, text + 2 * CUT, text + 3 * CUT)


@pytest.mark.parametrize("text", TEXTS)
def test_no_delta_holds_half_a_character(text, tiny):
    detokenizer = Detokenizer(tiny)
    deltas = pushed_singly(detokenizer, list(text.encode()))
    assert [delta for delta in deltas if delta] == list(text)
    assert detokenizer.finish() == ""


def test_bytes_that_can_become_no_character_come_out_at_once(tiny):
    detokenizer = Detokenizer(tiny)
    assert pushed_singly(detokenizer, [0xFF, 0x80, 0xC0]) == [CUT, CUT, CUT]
    assert pushed_singly(detokenizer, [0xE2, 0x28]) == ["", CUT + "("]


def test_an_output_that_ends_inside_a_character_ends_with_the_replacement_character(tiny):
    detokenizer = Detokenizer(tiny)
    assert pushed_singly(detokenizer, list("😀".encode())[:3]) == ["", "", ""]
    assert detokenizer.finish() == CUT


def test_special_tokens_are_skipped_or_kept(tiny):
    ids = [104, 261, 262]
    assert pushed_singly(Detokenizer(tiny), ids) == ["h", "", "<tag x>"]
    assert pushed_singly(Detokenizer(tiny, skip_special_tokens=False), ids) == ["h", "</s>", "<tag x>"]


def test_a_skipped_token_inside_a_character_does_not_break_it(tiny):
    first, *rest = "é".encode()
    assert "".join(pushed_singly(Detokenizer(tiny), [first, 261, *rest])) == "é"


def test_an_id_outside_the_vocabulary_is_refused(tiny):
    with pytest.raises(InvalidRequestError, match="token id 265"):
        Detokenizer(tiny).push([265])
