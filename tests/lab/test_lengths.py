from __future__ import annotations

from random import Random

from millpond.lab.lengths import Lengths, workload_of


def test_lengths_go_in_turn_or_are_drawn_from_both_ends():
    assert Lengths((4, 10)).of(5, Random(0)) == [4, 10, 4, 10, 4]
    drawn = Lengths(range(4, 7), drawn=True).of(100, Random(0))
    assert set(drawn) == {4, 5, 6}


def test_lengths_are_written_as_they_are_read():
    assert [str(Lengths((6,))), str(Lengths((4, 10))), str(Lengths(range(4, 17), drawn=True))] == ["6", "4,10", "4-16"]


def test_a_workload_is_the_same_for_the_same_seed():
    drawn = Lengths(range(1, 50), drawn=True)
    first = workload_of(20, drawn, drawn, vocab_size=100, seed=1)
    assert first == workload_of(20, drawn, drawn, vocab_size=100, seed=1)
    assert first != workload_of(20, drawn, drawn, vocab_size=100, seed=2)


def test_the_vocabulary_changes_no_length():
    drawn = Lengths(range(1, 50), drawn=True)
    shapes = [
        [(len(each.prompt_token_ids), each.max_tokens) for each in workload_of(9, drawn, drawn, vocab_size=v, seed=3)]
        for v in (10, 50_000)
    ]
    assert shapes[0] == shapes[1]


def test_fixed_lengths_are_met_and_all_come_at_once():
    requests = workload_of(4, Lengths((6,)), Lengths((10, 2)), vocab_size=10, seed=0)
    assert [(len(each.prompt_token_ids), each.max_tokens) for each in requests] == [(6, 10), (6, 2), (6, 10), (6, 2)]
    assert {each.arrival for each in requests} == {0.0}
