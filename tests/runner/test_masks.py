"""Masks over the logits: what they leave, that they come before everything else, and that nobody else feels them."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.core.masks import TokenMask
from millpond.core.request import SamplingParams
from millpond.core.step import Admission, ScheduledRequest, SchedulerOutput
from millpond.runner.model_runner import NOTHING_TO_CHOOSE
from millpond.runner.sampler import Sampler
from millpond.runner.sampler_kernels import ALL_MASKED, NO_DRAFT, NOT_FINITE, NOT_REACHED
from runner import reference_sampler as reference
from tiny_llama import write_tiny_llama
from tiny_runner import GREEDY, assert_same_bits, drive, random_tokens, tiny_runner

VOCAB, WIDTH = 300, 336


def masked(row, mask, output, guesses=()):
    """The slow, obvious way: the row after the mask, for an output that ends with these guesses."""
    row = row[:VOCAB].copy()
    seen = [*output, *guesses]
    for token in range(VOCAB):
        banned = any(
            run[-1] == token and len(seen) >= len(run) - 1 and seen[len(seen) - len(run) + 1 :] == list(run[:-1])
            for run in mask.banned_runs
        )
        early_end = token in mask.end_token_ids and len(seen) < mask.min_tokens
        if banned or early_end or (mask.allowed is not None and token not in mask.allowed):
            row[token] = -np.inf
    for token, bias in mask.biases:
        row[token] += np.float32(bias)
    return row


MASKS = {
    "allowed": TokenMask(allowed=(5, 48, 47, 299, 5)),
    "banned": TokenMask(banned_runs=((3,), (10, 11), (11, 10), (10, 10, 12), (1, 2, 3, 4, 5))),
    "minimum": TokenMask(min_tokens=5, end_token_ids=(0, 2, 3, 5, 10, 11, 12, 298)),
    "biased": TokenMask(biases=((0, -100.0), (7, 2.5), (299, 100.0))),
    "all": TokenMask(
        allowed=tuple(range(0, 300, 2)),
        banned_runs=((4,), (6, 8)),
        min_tokens=4,
        end_token_ids=(2, 5),
        biases=((4, 9.0),),
    ),
}
RULES = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=1.5),
    "drawn from few": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
every_rule = pytest.mark.parametrize("sampling", RULES.values(), ids=RULES)


def random_rows(count, seed=0):
    rows = 2 * np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)
    rows[:, [0, 2, 3, 5, 10, 11, 12, 298]] += 4  # what the masks speak of is likely
    rows[:, VOCAB:] = 1e9
    return rows


def sampler_with(sampling, mask, *, output=(), slots=3, slot=1):
    sampler = Sampler(slots, VOCAB, WIDTH)
    sampler.admit(slot, Admission((1, 2, 3), tuple(output), sampling, 7, mask))
    return sampler


def noted(rows):
    """The tops of each tile as the head notes them, the last with its padding."""
    return rows.reshape(len(rows), -1, 48).max(axis=2)


@every_mask
@every_rule
@pytest.mark.parametrize("with_tops", [False, True])
def test_a_masked_answer_is_the_reference_samplers_over_masked_rows(mask, sampling, with_tops):
    sampler, output, expected, changed = sampler_with(sampling, mask), [], [], 0
    for row in random_rows(40):
        arguments = (row[None].copy(), [1], [len(output)], None, noted(row[None]) if with_tops else None)
        want = reference.sample(masked(row, mask, output), sampling, 7, (1, 2, 3), tuple(output))
        changed += want != reference.sample(row[:VOCAB], sampling, 7, (1, 2, 3), tuple(output))
        expected.append(want)
        output += sampler.sample(*arguments)[0]
    assert output == expected
    assert changed, "the mask changed nothing here, so this shows nothing"


@every_mask
@every_rule
@pytest.mark.parametrize("num_right", range(6))
def test_rows_behind_guesses_are_masked_as_if_the_guesses_were_the_output(mask, sampling, num_right):
    rows = random_rows(12, seed=1)
    alone, expected = sampler_with(sampling, mask), []
    for position, row in enumerate(rows):
        expected += alone.sample(row[None].copy(), [1], [position])[0]
    guesses = [token if index < num_right else (token + 1) % VOCAB for index, token in enumerate(expected[2:7])]
    sampler = sampler_with(sampling, mask)
    for position in (0, 1):
        assert sampler.sample(rows[position][None].copy(), [1], [position])[0] == [expected[position]]
    got, _ = sampler.sample(rows[2:8].copy(), [1] * 6, list(range(2, 8)), [NO_DRAFT, *guesses])
    assert got == expected[2 : 3 + num_right] + [NOT_REACHED] * (5 - num_right)
    for position in range(3 + num_right, 12):
        assert sampler.sample(rows[position][None].copy(), [1], [position])[0] == [expected[position]]


def test_a_run_is_banned_across_what_was_there_before_a_preemption():
    mask = TokenMask(banned_runs=((8, 9, 4),))
    row = np.zeros((1, WIDTH), np.float32)
    row[0, [4, 6]] = 9, 8
    for output, expected in (([8, 9], 6), ([9, 9], 4), ([9], 4), ([], 4), ([1, 8, 9], 6)):
        sampler = sampler_with(GREEDY, mask, output=output)
        assert sampler.sample(row.copy(), [1], [len(output)])[0] == [expected], output


def test_a_run_is_banned_across_the_output_and_the_guesses_behind_it():
    mask = TokenMask(banned_runs=((8, 9, 4),))
    rows = np.zeros((3, WIDTH), np.float32)
    rows[:, [4, 6]] = 9, 8
    rows[0, 8], rows[1, 9] = 10, 10
    for output, drafts, expected in (
        ([8], [9], [9, 6]),
        ([1], [8, 9], [8, 9, 6]),
        ([8], [8, 9], [8, 9, 6]),
        ([9], [9], [9, 4]),
    ):
        sampler = sampler_with(GREEDY, mask, output=output)
        used = rows[3 - len(expected) :].copy()
        positions = list(range(len(output), len(output) + len(used)))
        assert sampler.sample(used, [1] * len(used), positions, [NO_DRAFT, *drafts])[0] == expected, (output, drafts)


def test_a_neighbours_row_is_not_touched_and_the_next_in_the_slot_is_not_masked():
    sampler = sampler_with(GREEDY, TokenMask(allowed=(5,)))
    sampler.admit(0, Admission((1,), (), GREEDY, 0))
    rows = random_rows(2)
    before, best = rows[0].copy(), int(rows[0, :VOCAB].argmax())
    assert sampler.sample(rows, [0, 1], [0, 0])[0] == [best, 5]
    np.testing.assert_array_equal(rows[0], before)
    sampler.admit(1, Admission((1,), (), GREEDY, 0))
    assert sampler.sample(rows[:1].copy(), [1], [0])[0] == [best]
    assert sampler._masks == {}


def test_a_mask_that_leaves_nothing_says_so_and_one_over_a_fault_does_not_hide_it():
    everything = TokenMask(allowed=(5,), banned_runs=((5,),))
    for fault, expected in ((1.0, ALL_MASKED), (np.nan, NOT_FINITE), (np.inf, NOT_FINITE)):
        rows = random_rows(1)
        rows[0, 250] = fault
        tokens, flags = sampler_with(GREEDY, everything).sample(rows, [1], [0])
        assert (tokens, flags) == ([expected], [expected == NOT_FINITE])


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    path = tmp_path_factory.mktemp("masks") / "tiny.gguf"
    write_tiny_llama(path, head_dim=32, tied=False)
    return tiny_runner(path)


def test_a_masked_request_has_the_same_bits_in_a_crowd_as_alone_and_when_preempted(runner):
    mask = TokenMask(allowed=tuple(range(3, 200)), banned_runs=((90,), (7, 8)), biases=((20, 5.0),))
    prompts = {name: random_tokens(count, seed=count) for name, count in zip("abcd", (33, 5, 16, 47), strict=True)}
    alone = {name: drive(runner, {name: prompt}, mask=mask)[0][name] for name, prompt in prompts.items()}
    for sizes in ({}, {"num_blocks": 5, "max_num_batched_tokens": 23}):
        crowd, scheduler = drive(runner, prompts, mask=mask, **sizes)
        for name in prompts:
            assert_same_bits(crowd[name], alone[name])
    assert scheduler.counters.preemptions > 0
    plain, _ = drive(runner, prompts)
    assert any(plain[name].token_ids != alone[name].token_ids for name in prompts)


def test_when_a_masked_request_has_ended_the_sampler_has_no_mask_to_look_for(runner):
    def step(*scheduled, released=()):
        runner.execute(SchedulerOutput(0, scheduled, released=released))
        return set(runner.sampler._masks)

    a, b = (
        ScheduledRequest(name, slot, 0, (5,), (slot,), True, 0, Admission((5,), (), GREEDY, 0, mask))
        for slot, (name, mask) in enumerate({"a": TokenMask(allowed=(5, 6)), "b": None}.items())
    )
    assert step(a, b) == {0}
    later = b._replace(admission=None, first_position=1, output_position=1)
    assert step(later) == {0}
    assert step(later, released=("a",)) == set()
    assert runner._special == {}


def test_a_request_whose_mask_leaves_nothing_ends_with_a_fault_that_says_so(runner):
    answers, _ = drive(runner, {"a": [5, 6]}, mask=TokenMask(allowed=(5,), banned_runs=((5,),)))
    assert "leave no token to choose" in answers["a"].fault
    assert NOTHING_TO_CHOOSE[ALL_MASKED][1] == "allowed_token_ids"
