"""Guessing on the real model: the same answers in fewer steps, and hardly a guess where none would be right."""

from __future__ import annotations

import pytest

from millpond.core.request import SamplingParams
from millpond.core.speculation import PromptLookup, StepLoad
from millpond.lab.asking import Ask, drive
from millpond.lab.fresh_engine import engine_over

pytestmark = pytest.mark.slow

LIST = "apples, pears, plums, figs, dates, limes, grapes, melons, cherries, lemons, olives, peaches, quinces, mangos"
SAMPLINGS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    "penalised": {"temperature": 0, "repetition_penalty": 1.1},
}


class Eager(PromptLookup):
    """Guesses as if a step cost the same whatever is in it."""

    def draft(self, request, most, load):
        return super().draft(request, most, StepLoad(0, 0))


def chat(base, question, **sampling):
    prompt = base.chat_template.render([{"role": "user", "content": question}])
    return Ask(base.tokenizer.encode(prompt, add_special_tokens=False), SamplingParams(**sampling))


def both(base, ask):
    """One request without guesses and with them: what it got, and the engine that gave it."""
    plain, guessing = engine_over(base), engine_over(base, drafter=PromptLookup(8))
    return drive(plain, {"a": ask})["a"], drive(guessing, {"a": ask})["a"], plain.scheduler, guessing.scheduler


def test_a_text_that_is_repeated_takes_less_than_half_of_the_steps(base):
    ask = chat(base, f"Repeat this list twice: {LIST}", max_tokens=96, temperature=0)
    plain, guessed, slow, fast = both(base, ask)
    assert guessed == plain
    assert fast.counters.iterations * 2 < slow.counters.iterations
    assert fast.counters.accepted_tokens > fast.counters.drafted_tokens * 0.7


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_an_open_question_gets_the_same_answer_and_few_guesses(base, sampling):
    plain, guessed, slow, fast = both(base, chat(base, "Why is the sky blue?", max_tokens=48, **sampling))
    assert guessed == plain
    assert fast.counters.iterations <= slow.counters.iterations
    assert fast.counters.drafted_tokens < 48


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_text_that_is_continued_stays_the_same_by_every_rule(base, sampling):
    prompt = base.tokenizer.encode(f"{LIST}\n{LIST}\n{LIST}\n{LIST[:50]}")
    plain, guessed, _, fast = both(base, Ask(prompt, SamplingParams(max_tokens=40, **sampling)))
    assert guessed == plain
    assert fast.counters.accepted_tokens > 0


def test_a_crowd_gets_the_answers_that_each_gets_alone_without_guesses(base, eight, alone):
    engine = engine_over(base, max_num_batched_tokens=64, max_num_seqs=7, drafter=Eager(8))
    assert drive(engine, eight) == alone
    assert 0 < engine.scheduler.counters.accepted_tokens < engine.scheduler.counters.drafted_tokens
