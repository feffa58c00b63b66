"""Answers with guesses and without them: the same text, tokens, counts and ends."""

from __future__ import annotations

import random

import pytest

from engine_helpers import drive, text_of
from helpers import ScriptedDrafter, ScriptedRunner
from millpond.core.request import FinishReason, SamplingParams
from millpond.core.speculation import PromptLookup
from tiny_engine import IM_END, LETTERS, ids, make_engine


class ScriptReader(ScriptedDrafter):
    """Guesses the next `count` tokens of a script."""

    def __init__(self, script, count=8):
        super().__init__()
        self.script, self.count = script, count

    def draft(self, request, most, load):
        at = request.num_output_tokens
        return tuple(self.script[at : at + min(most, self.count)])


def scripted(script, *, drafter, **sampling):
    """The outputs of one request whose tokens are scripted, and how many steps it took."""
    engine = make_engine(script={"a": script}, drafter=drafter)
    engine.add_request("a", ids("hi"), SamplingParams(**{"max_tokens": 30, **sampling}))
    return drive(engine)["a"], len(engine.runner.outputs)


def whole(outputs):
    last = outputs[-1]
    tokens = [token for output in outputs for token in output.new_token_ids]
    return text_of(outputs), tokens, last.finish_reason, last.num_output_tokens, last.num_prompt_tokens, last.error


HALF = "é".encode()[0] + 3
ENDS = {
    "max_tokens": (ids("hello world, and more"), {"max_tokens": 7}),
    "an end token": ([*ids("hello"), IM_END, *ids("more")], {}),
    "an end token that is shown": ([*ids("hello"), IM_END, *ids("more")], {"include_stop_str_in_output": True}),
    "a stop token": (ids("hello world"), {"stop_token_ids": tuple(ids("w"))}),
    "a stop string": (ids("hello world, and more"), {"stop": ("o wor",)}),
    "a stop string that is kept": (ids("hello world"), {"stop": ("o w",), "include_stop_str_in_output": True}),
    "the first of two stop strings": (ids("one two three"), {"stop": ("three", "two")}),
    "a stop string at the last allowed token": (ids("abc"), {"stop": ("bc",), "max_tokens": 3}),
    "a stop string before the last allowed token": (ids("abcdef"), {"stop": ("bc",), "max_tokens": 5}),
    "a stop string before a stop token": (ids("abcd!"), {"stop": ("bc",), "stop_token_ids": tuple(ids("!"))}),
    "half a stop string": (ids("abcdb"), {"stop": ("bcx",), "max_tokens": 5}),
    "half a character": ([*ids("né"), HALF], {"max_tokens": 4}),
    "a token that is no token": ([*ids("ok"), 10**6, *ids("more")], {}),
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize(("script", "sampling"), ENDS.values(), ids=ENDS)
def test_every_end_is_the_same_with_guesses(script, sampling, count):
    plain, plain_steps = scripted(script, drafter=None, **sampling)
    guessed, steps = scripted(script, drafter=ScriptReader(script, count), **sampling)
    assert whole(guessed) == whole(plain)
    assert steps < plain_steps


def test_the_text_of_a_step_is_that_of_all_its_tokens():
    script = ids("añ€😀z") + ids("more")
    outputs, _ = scripted(script, drafter=ScriptReader(script, 5), max_tokens=12)
    assert [output.text for output in outputs] == ["añ€", "😀z" + "m"]
    assert [output.num_output_tokens for output in outputs] == [6, 12]


def test_nothing_is_said_of_tokens_behind_a_stop_string():
    script = ids("ab.cdefgh")
    outputs, _ = scripted(script, drafter=ScriptReader(script), stop=(".",))
    (only,) = outputs
    assert (only.text, only.new_token_ids, only.num_output_tokens) == ("ab", tuple(ids("ab.")), 3)


def test_a_request_that_ended_early_leaves_blocks_and_slot_to_others():
    script = ids("ab.cdefgh")
    engine = make_engine(script={"a": script}, drafter=ScriptReader(script))
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=30, stop=(".",)))
    drive(engine)
    assert engine.scheduler.pool.num_free == 64


def test_the_numbers_of_a_step_tell_guesses_and_right_ones():
    script = ids("abcdefgh")
    seen = []
    engine = make_engine(script={"a": script[:3]}, drafter=ScriptReader(script, 4))
    engine.observer = seen.append
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    assert [(each.num_tokens, each.num_sampled, each.num_drafted, each.num_accepted) for each in seen] == [(6, 4, 4, 3)]


def random_work(seed):
    """Engine sizes and requests at random: short alphabets repeat, tight pools preempt, budgets cut prompts."""
    rng = random.Random(seed)
    sizes = {
        "num_blocks": rng.choice([8, 9, 12]),
        "max_num_seqs": rng.choice([1, 3, 6]),
        "max_num_batched_tokens": rng.choice([6, 9, 64]),
    }
    letters = range(LETTERS.start, LETTERS.start + rng.choice([2, 3, 26]))
    requests = {}
    for index in range(8):
        prompt = [rng.choice(letters) for _ in range(rng.randint(1, 12))]
        requests[str(index)] = (
            prompt,
            SamplingParams(
                max_tokens=rng.randint(1, 18),
                stop=rng.choice([(), ("ab",), ("a", "bb")]),
                ignore_eos=rng.random() < 0.8,
            ),
        )
    return sizes, letters, requests


def answers(seed, drafter):
    sizes, letters, requests = random_work(seed)
    engine = make_engine(**sizes, drafter=drafter)
    engine.runner = ScriptedRunner(block_size=4, tokens=letters)
    for name, (prompt, sampling) in requests.items():
        engine.add_request(name, prompt, sampling)
    outputs = drive(engine, until=1000)
    assert engine.scheduler.pool.num_free == sizes["num_blocks"]
    return {name: whole(each) for name, each in outputs.items()}, engine.scheduler.counters


def test_crowds_on_tight_pools_get_the_same_answers_with_guesses():
    totals = [0, 0, 0]
    for seed in range(60):
        plain, _ = answers(seed, None)
        looked_up, counters = answers(seed, PromptLookup(8))
        guessed, more = answers(seed, ScriptedDrafter(tokens=random_work(seed)[1]))
        assert looked_up == guessed == plain
        totals[0] += counters.accepted_tokens
        totals[1] += more.accepted_tokens
        totals[2] += more.preemptions
    assert all(total > least for total, least in zip(totals, (100, 1000, 30), strict=True))


def test_a_cut_off_answer_says_length_with_guesses_too():
    script = ids("abcabcabcabc")
    outputs, _ = scripted(script, drafter=PromptLookup(4), max_tokens=12)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert text_of(outputs) == "abcabcabcabc"
