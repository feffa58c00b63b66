"""Guesses in the sampler and the model runner: the same tokens from the same bits, however good they are."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import ScriptedDrafter
from millpond.core.request import SamplingParams
from millpond.core.speculation import PromptLookup
from millpond.core.step import Admission
from millpond.runner.sampler import Sampler
from millpond.runner.sampler_kernels import NO_DRAFT, NOT_FINITE, NOT_REACHED
from tiny_llama import write_tiny_llama
from tiny_runner import GREEDY, TYPES, assert_same_bits, drive, fill_with_leftovers, random_tokens, tiny_runner

VOCAB = 300
RULES = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=1.5),
    "drawn from few": SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01),
    "greedy with penalties": SamplingParams(
        temperature=0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "drawn with penalties": SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=1.0),
}
every_rule = pytest.mark.parametrize("sampling", RULES.values(), ids=RULES)


def sampler_for(sampling: SamplingParams, slots: int = 2) -> Sampler:
    sampler = Sampler(slots, VOCAB, VOCAB)
    for slot in range(slots):
        sampler.admit(slot, Admission((1, 2, 3), (), sampling, 7 + slot))
    return sampler


def one_by_one(logits, sampling):
    """The tokens of a request that gets one row a step."""
    sampler = sampler_for(sampling)
    return [sampler.sample(row[None], [0], [position])[0][0] for position, row in enumerate(logits)]


@every_rule
@pytest.mark.parametrize("num_right", range(6))
def test_rows_behind_right_guesses_give_the_tokens_of_one_row_a_step(sampling, num_right):
    logits = 3 * np.random.default_rng(0).standard_normal((12, VOCAB)).astype(np.float32)
    expected = one_by_one(logits, sampling)
    guesses = [token if index < num_right else (token + 1) % VOCAB for index, token in enumerate(expected[:5])]
    sampler = sampler_for(sampling)
    got, bad = sampler.sample(logits[:6], [0] * 6, list(range(6)), [NO_DRAFT, *guesses])
    assert got == expected[: num_right + 1] + [NOT_REACHED] * (5 - num_right)
    assert bad == [False] * 6
    for position in range(num_right + 1, 12):
        assert sampler.sample(logits[position : position + 1], [0], [position])[0] == [expected[position]]


def test_a_wrong_guess_of_one_request_does_not_reach_the_next():
    logits = np.random.default_rng(1).standard_normal((5, VOCAB)).astype(np.float32)
    tokens = logits.argmax(axis=1).tolist()
    drafts = [NO_DRAFT, tokens[0] + 1, tokens[1], NO_DRAFT, tokens[3]]
    got, _ = sampler_for(GREEDY).sample(logits, [0, 0, 0, 1, 1], [0, 1, 2, 0, 1], drafts)
    assert got == [tokens[0], NOT_REACHED, NOT_REACHED, tokens[3], tokens[4]]


def test_nothing_is_reached_behind_a_row_that_is_not_finite():
    logits = np.random.default_rng(2).standard_normal((4, VOCAB)).astype(np.float32)
    tokens = logits.argmax(axis=1).tolist()
    logits[1, 5] = np.nan
    got, bad = sampler_for(GREEDY).sample(logits, [0] * 4, [0, 1, 2, 3], [NO_DRAFT, *tokens[:3]])
    assert got == [tokens[0], NOT_FINITE, NOT_REACHED, NOT_REACHED]
    assert bad == [False, True, False, False]


class Scramble(ScriptedDrafter):
    """Guesses from the request's own answer, which it is told beforehand; the hash of the tokens says how many."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def draft(self, request, most, load):
        state = np.random.default_rng(request.num_tokens + 1000 * request.arrival)
        count, num_right = min(most, int(state.integers(0, 14))), int(state.integers(0, 14))
        known = self.answers[request.request_id].token_ids[request.num_output_tokens :][:count]
        return tuple(token if index < num_right else (token + 1) % 267 for index, token in enumerate(known))


PROMPTS = {name: random_tokens(count, seed=count) for name, count in zip("abcde", (33, 5, 16, 1, 47), strict=True)}


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@every_rule
def test_with_guesses_every_token_comes_from_the_same_bits(tmp_path, types, sampling):
    """In a crowd, in chunks, preempted and resumed, over a cache in which nothing was a number before."""
    write_tiny_llama(tmp_path / "tiny.gguf", heads=6, kv_heads=2, head_dim=32, tied=False)
    runner = tiny_runner(tmp_path / "tiny.gguf", **types, speculative="ngram", speculative_tokens=13)
    plain, _ = drive(runner, PROMPTS, max_tokens=40, sampling=sampling)
    fill_with_leftovers(runner)
    num_preemptions = []
    for sizes in ({}, {"num_blocks": 7, "max_num_batched_tokens": 23}):
        drafter = Scramble(plain)
        guessed, scheduler = drive(runner, PROMPTS, max_tokens=40, sampling=sampling, drafter=drafter, **sizes)
        assert sum(1 for _, drafted, accepted in drafter.learned if 0 < accepted < drafted) > 5
        num_preemptions.append(scheduler.counters.preemptions)
        for name in PROMPTS:
            assert_same_bits(guessed[name], plain[name])
    assert num_preemptions[1] > 3


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.3, repetition_penalty=1.05)])
def test_looked_up_guesses_change_no_bit_and_save_steps(tmp_path, sampling):
    write_tiny_llama(tmp_path / "tiny.gguf", head_dim=32, seed=3)
    runner = tiny_runner(tmp_path / "tiny.gguf", speculative="ngram")
    prompts = {"a": [5, 6, 7, 8] * 6, "b": [9] * 10}
    plain, without = drive(runner, prompts, max_tokens=60, sampling=sampling)
    guessed, with_guesses = drive(runner, prompts, max_tokens=60, sampling=sampling, drafter=PromptLookup(8))
    for name in prompts:
        assert_same_bits(guessed[name], plain[name])
    assert with_guesses.counters.accepted_tokens > 0
    assert with_guesses.counters.iterations < without.counters.iterations


def test_a_request_whose_logits_are_not_finite_behind_a_right_guess_fails_where_it_would_have(tmp_path, monkeypatch):
    write_tiny_llama(tmp_path / "tiny.gguf", head_dim=32, tied=False)
    runner = tiny_runner(tmp_path / "tiny.gguf", speculative="ngram")
    prompts = {"a": PROMPTS["a"], "b": PROMPTS["b"]}
    sampling = SamplingParams(temperature=3.0)
    plain, _ = drive(runner, prompts, sampling=sampling)
    sick = plain["a"].token_ids[3]
    assert sick not in [*plain["a"].token_ids[:3], *plain["b"].token_ids, *PROMPTS["a"], *PROMPTS["b"]]
    forward = runner._forward

    def with_sick_rows(batch, scratch, *rest):
        forward(batch, scratch, *rest)
        for each in (scratch.logits, scratch.tops):
            each[: len(batch.sampled)][batch.tokens[batch.sampled] == sick] = np.nan

    monkeypatch.setattr(runner, "_forward", with_sick_rows)
    expected, _ = drive(runner, prompts, sampling=sampling)
    assert (len(expected["a"].token_ids), len(expected["b"].token_ids)) == (4, 12)
    got, scheduler = drive(runner, prompts, sampling=sampling, drafter=Scramble(plain))
    assert scheduler.counters.accepted_tokens > 0
    for name in prompts:
        assert (got[name].token_ids, got[name].fault) == (expected[name].token_ids, expected[name].fault)
