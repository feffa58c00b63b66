"""Offline: several answers to one prompt, and scores of tokens."""

from __future__ import annotations

import pytest

from engine_helpers import drive
from helpers import ScriptedDrafter, scripted_score
from millpond.core.request import SamplingParams
from millpond.core.step import RequestScores
from millpond.errors import InvariantError
from millpond.llm import LLM
from tiny_engine import LETTERS, ids, make_engine


def params(**settings):
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **settings})


def test_each_prompt_gets_as_many_outputs_as_it_asks_for():
    engine = make_engine(max_num_seqs=3)
    both = LLM.from_engine(engine).generate(["hi", "abc"], [params(n=5, seed=9), params()])
    assert [[output.index for output in each.outputs] for each in both] == [[0, 1, 2, 3, 4], [0]]
    assert all(len(output.token_ids) == 6 for each in both for output in each.outputs)
    seeds = [admission.seed for _, _, admission in engine.runner.admissions][:5]
    assert seeds == [9, 10, 11, 12, 13]
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_scores_come_with_the_tokens_for_those_who_ask():
    llm = LLM.from_engine(make_engine(max_num_batched_tokens=4))
    scored, plain = llm.generate([ids("hello"), ids("hello")], [params(logprobs=2, prompt_logprobs=1), params()])
    (output,) = scored.outputs
    assert output.logprobs == [scripted_score(token_id, 2) for token_id in output.token_ids]
    assert scored.prompt_logprobs == [None, *(scripted_score(token_id, 1) for token_id in ids("ello"))]
    assert (plain.outputs[0].logprobs, plain.prompt_logprobs) == (None, None)


@pytest.mark.parametrize("stop", [(), ("e",), ("zq",)])
def test_there_is_a_score_for_each_token_that_counts_with_guesses_too(stop):
    """A stop string takes the tokens behind it back, and their scores with them."""
    drafter = ScriptedDrafter(tokens=LETTERS)
    for prompt in ("hi", "abc", "x", "more"):
        (got,) = LLM.from_engine(make_engine(drafter=drafter)).generate(
            [prompt], params(logprobs=0, stop=stop, max_tokens=40)
        )
        (output,) = got.outputs
        assert [score.token_id for score in output.logprobs] == output.token_ids


def test_a_prompts_scores_come_whole_and_once_with_its_first_token():
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request("a", ids("a long prompt"), params(prompt_logprobs=0))
    outputs = drive(engine)["a"]
    assert [score.token_id for score in outputs[0].prompt_scores] == ids(" long prompt")
    assert [output.prompt_scores for output in outputs[1:]] == [None] * 5


def test_a_gap_in_a_prompts_scores_is_a_broken_rule():
    engine = make_engine()
    engine.add_request("a", ids("abc"), params(prompt_logprobs=0))
    answer = engine._answers["a"]
    answer.note(RequestScores("a", (), 1, (scripted_score(5, 0),)))
    with pytest.raises(InvariantError, match="request a: its prompt's scores go on at 3, but have come up to 1"):
        answer.note(RequestScores("a", (), 3, (scripted_score(5, 0),)))
