from __future__ import annotations

import pytest

from millpond.errors import ConfigError, EngineError
from millpond.lab.bench_speculative import SpeculativeBench, SpeculativePlan, SpeculativeRow
from millpond.lab.speculative_prompts import PROMPTS
from tiny_engine import make_engine

ECHO = [10, 11, 12, 13] * 3


class Echo:
    """A runner that says a prompt over and over: what prompt lookup is best at. A step takes a second."""

    def __init__(self, inner):
        self.inner = inner
        self.now = 0.0

    def clock(self):
        return self.now

    def execute(self, output):
        self.now += 1.0
        for each in output.scheduled:
            if each.admission is not None:
                self.inner.script[each.request_id] = list(each.admission.prompt_token_ids) * 20
        return self.inner.execute(output)


def bench(prompts, wrap=Echo, **sizes):
    engine = make_engine(wrap=wrap, **sizes)
    clock = getattr(engine.runner, "clock", lambda: 0.0)
    return SpeculativeBench(engine, prompts, clock), engine


def test_a_text_that_is_repeated_gains_by_the_steps_that_are_saved():
    speculative, engine = bench({"echo": [ECHO]})
    (row,) = speculative.run(SpeculativePlan(sequences=(1,), max_tokens=40, rounds=1), lambda name: None)
    assert (row.workload, row.num_sequences) == ("echo", 1)
    # Without guesses a step gives a token; the first step is the prompt's own.
    assert row.plain_tok_s == 1.0
    assert row.gain == row.guessed_tok_s > 3
    assert row.accepted <= row.drafted
    assert row.tokens_per_step == pytest.approx(row.guessed_tok_s)
    assert not engine.has_unfinished


def test_every_prompt_is_answered_with_and_without_guesses_in_turns():
    speculative, engine = bench({"echo": [ECHO, ECHO[1:], ECHO[2:]]})
    seen = []
    add = engine.add_request
    engine.add_request = lambda name, prompt, sampling: (
        seen.append((engine.scheduler.drafter is not None, len(prompt), sampling.seed)) or add(name, prompt, sampling)
    )
    speculative.run(SpeculativePlan(sequences=(2,), max_tokens=5, rounds=2), lambda name: None)
    turn = [(length, seed) for seed, length in enumerate((12, 11, 10))]
    assert seen == [(guessing, *each) for _ in range(3) for guessing in (False, True) for each in turn]


def test_more_sequences_than_prompts_take_the_prompts_again():
    speculative, engine = bench({"echo": [ECHO, ECHO[1:]]})
    running = []
    engine.observer = lambda stats: running.append(stats.num_scheduled)
    speculative.run(SpeculativePlan(sequences=(4,), max_tokens=5, rounds=1), lambda name: None)
    assert max(running) == 4


def test_each_workload_is_measured_at_each_number_of_sequences():
    names = []
    rows = bench({"a": [ECHO], "b": [ECHO[1:]]})[0].run(
        SpeculativePlan(sequences=(1, 2), max_tokens=3, rounds=1), names.append
    )
    assert names == ["a, 1 at once", "a, 2 at once", "b, 1 at once", "b, 2 at once"]
    assert [(row.workload, row.num_sequences) for row in rows] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_an_answer_that_guessing_changes_is_a_bug_and_ends_it():
    class Liar(Echo):
        def execute(self, output):
            for each in output.scheduled:
                if each.num_drafts:
                    self.inner.script[each.request_id][each.output_position] = 50
            return super().execute(output)

    speculative, _ = bench({"echo": [ECHO]}, Liar)
    with pytest.raises(EngineError, match="echo: an answer with guesses differs"):
        speculative.run(SpeculativePlan(sequences=(1,), max_tokens=20, rounds=1), lambda name: None)


def test_a_text_without_repetition_loses_nothing_in_steps():
    class Plain(Echo):
        def execute(self, output):
            self.now += 1.0
            return self.inner.execute(output)

    speculative, _ = bench({"plain": [[5, 6, 7]]}, Plain)
    (row,) = speculative.run(SpeculativePlan(sequences=(1,), max_tokens=30, rounds=1), lambda name: None)
    assert row.gain >= 1.0


def test_json_rounds_what_was_measured():
    row = SpeculativeRow("echo", 1, 1.00049, 2.0, 2.0, 1.5, 8, 4)
    assert row.as_json() == {
        "workload": "echo",
        "num_sequences": 1,
        "plain_tok_s": 1.0,
        "guessed_tok_s": 2.0,
        "gain": 2.0,
        "tokens_per_step": 1.5,
        "drafted": 8,
        "accepted": 4,
    }


def test_the_prompts_are_of_both_kinds_and_as_many():
    assert {name: len(texts) for name, texts in PROMPTS.items()} == {"repetitive": 4, "ordinary": 4}


def test_a_plan_of_no_rounds_is_refused():
    with pytest.raises(ConfigError, match="rounds must be at least 1, got 0"):
        SpeculativePlan(rounds=0)
