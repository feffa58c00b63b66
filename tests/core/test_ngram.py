"""The index of runs against a look-up that walks the whole sequence."""

import random

import pytest

from millpond.core.ngram import RUN_LENGTHS, NgramIndex


def index_of(token_ids):
    index = NgramIndex()
    index.extend(token_ids)
    return index


def found_by_walking(token_ids):
    for length in RUN_LENGTHS:
        run = token_ids[-length:]
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == run:
                return length, end
    return None


@pytest.mark.parametrize("alphabet", [1, 2, 3, 10])
def test_it_finds_the_last_appearance_of_the_longest_run(alphabet):
    rng = random.Random(alphabet)
    for _ in range(200):
        token_ids = [rng.randrange(alphabet) for _ in range(rng.randrange(40))]
        assert index_of(token_ids).find() == found_by_walking(token_ids)


def test_it_is_the_same_however_the_tokens_came():
    rng = random.Random(0)
    token_ids = [rng.randrange(3) for _ in range(100)]
    index = NgramIndex()
    for end in range(1, 101):
        index.extend(token_ids[len(index) : end])
        assert index.find() == index_of(token_ids[:end]).find()
    assert len(index) == 100


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2], [1, 1], [1, 2, 3, 4, 5]])
def test_what_was_never_seen_before_is_not_found(token_ids):
    assert index_of(token_ids).find() is None


def test_the_continuation_is_what_came_behind_the_run():
    index = index_of([1, 2, 3, 4, 5, 6, 7, 2, 3])
    assert index.find() == (2, 3)
    assert index.continuation(3, 3) == (4, 5, 6)


def test_a_sequence_that_repeats_itself_goes_on_repeating():
    index = index_of([9, 1, 2, 1, 2, 1])
    assert index.find() == (3, 4)
    assert index.continuation(4, 5) == (2, 1, 2, 1, 2)


def test_of_two_appearances_the_later_one_counts():
    index = index_of([1, 2, 7, 1, 2, 8, 1, 2])
    assert index.continuation(index.find()[1], 1) == (8,)
