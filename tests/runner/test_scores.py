"""Log probabilities against float64, and the same bits of them however a request ran."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.core.request import SamplingParams
from millpond.core.step import Admission, TokenScore
from millpond.llm import LLM
from millpond.runner.prompt_scores import NOT_FINITE_MESSAGE, PromptScorer
from millpond.runner.scores import LEAST_LOGPROB, Scorer
from tiny_llama import write_tiny_llama
from tiny_runner import random_tokens

VOCAB = 1500


def expected_score(row, token_id, num_top):
    logits = row.astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    order = np.lexsort((np.arange(len(row)), -logits))[:num_top]
    return logprobs[token_id], 1 + (row > row[token_id]).sum(), [(each, logprobs[each]) for each in order.tolist()]


def rows():
    rng = np.random.default_rng(0)
    smooth = rng.standard_normal(VOCAB) * 5
    peaked = np.where(np.arange(VOCAB) == 700, 80.0, -20.0)
    ties = np.round(rng.standard_normal(VOCAB))
    return [each.astype(np.float32) for each in (smooth, peaked, ties, np.zeros(VOCAB), smooth - 1e6, smooth[:40])]


@pytest.mark.parametrize("row", rows(), ids=["smooth", "peaked", "ties", "flat", "far down", "few tokens"])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 40])
def test_scores_are_the_log_softmax_of_the_row(row, num_top):
    scorer = Scorer(row.size)
    for token_id in (0, 7, row.size - 1):
        score = scorer.score(row, token_id, num_top)
        logprob, rank, top = expected_score(row, token_id, num_top)
        assert (score.token_id, score.rank) == (token_id, rank)
        assert score.logprob == pytest.approx(logprob, abs=2e-6, rel=1e-6)
        assert [each for each, _ in score.top] == [each for each, _ in top]
        assert [value for _, value in score.top] == pytest.approx([value for _, value in top], abs=2e-6, rel=1e-6)


def test_a_logprob_does_not_depend_on_how_many_others_are_told():
    (row, *_), scorer = rows(), Scorer(VOCAB)
    values = {scorer.score(row, 7, num_top).logprob for num_top in range(21)}
    assert len(values) == 1
    assert scorer.score(row, 7, 20).top[:5] == scorer.score(row, 7, 5).top


def test_what_no_json_holds_is_never_a_score():
    scorer = Scorer(4)
    row = np.array([0.0, -np.inf, -np.inf, -np.inf], np.float32)
    assert scorer.score(row, 1, 2) == TokenScore(1, LEAST_LOGPROB, 2, ((0, 0.0), (1, LEAST_LOGPROB)))
    for fault in (np.nan, np.inf):
        row[2] = fault
        assert scorer.score(row, 0, 2) is None
    row[:] = -np.inf
    assert scorer.score(row, 0, 2) is None


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("scores") / "tiny.gguf"
    write_tiny_llama(path, head_dim=32, tied=False, padding_rows=8)
    return path


SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 32, "threads": 1, "audit": True}


def llm_over(path, **changes):
    return LLM.from_engine(build_engine(path, EngineConfig(**{**SIZES, **changes})))


@pytest.fixture(scope="module")
def llm(path):
    return llm_over(path)


PROMPTS = [random_tokens(count, seed=count) for count in (33, 1, 16, 100, 47)]
RULES = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=5, prompt_logprobs=3),
    SamplingParams(temperature=1.3, seed=3, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0),
    SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=9, ignore_eos=True, logprobs=20),
    SamplingParams(temperature=0.5, max_tokens=9, seed=1, logit_bias={9: 4.0}, bad_words=["e"], logprobs=3),
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, prompt_logprobs=20),
]


@pytest.fixture(scope="module")
def alone(llm):
    return [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(PROMPTS, RULES, strict=True)]


def scores_of(completion):
    return completion.outputs[0].token_ids, completion.outputs[0].logprobs, completion.prompt_logprobs


def test_the_scores_are_those_of_the_models_raw_logits(llm, alone):
    runner = llm.engine.runner
    for prompt, sampling, got in zip(PROMPTS, RULES, alone, strict=True):
        tokens, logprobs, prompt_logprobs = scores_of(got)
        logits, scorer = runner.logits([*prompt, *tokens]), Scorer(267)
        if sampling.logprobs is not None:
            assert logprobs == [
                scorer.score(logits[len(prompt) + i - 1], token, sampling.logprobs) for i, token in enumerate(tokens)
            ]
        if sampling.prompt_logprobs is not None:
            assert prompt_logprobs[0] is None
            assert prompt_logprobs[1:] == [
                scorer.score(logits[i], token, sampling.prompt_logprobs) for i, token in enumerate(prompt[1:])
            ]


def test_they_are_there_only_for_those_who_ask(alone):
    for sampling, got in zip(RULES, alone, strict=True):
        assert (got.outputs[0].logprobs is None) == (sampling.logprobs is None)
        assert (got.prompt_logprobs is None) == (sampling.prompt_logprobs is None)


@pytest.mark.parametrize(
    ("changes", "preempts"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 11, "max_num_seqs": 5}, False),
        ({"num_blocks": 12}, True),
        ({"speculative": "ngram"}, False),
        ({"max_num_seqs": 1}, False),
        ({"block_size": 32, "num_blocks": 8}, False),
    ],
    ids=str,
)
def test_scores_have_the_same_bits_in_a_crowd_in_chunks_preempted_and_with_guesses(path, alone, changes, preempts):
    llm = llm_over(path, **changes)
    crowd = llm.generate(PROMPTS, RULES)
    assert [scores_of(got) for got in crowd] == [scores_of(each) for each in alone]
    assert (llm.engine.scheduler.counters.preemptions > 0) == preempts
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks


def test_a_prompt_that_is_preempted_halfway_is_scored_once(path, alone):
    """Its chunks are small and the pool is full, so that it starts over; every position comes once."""
    llm = llm_over(path, num_blocks=10, max_num_batched_tokens=7, max_num_seqs=3, prefix_cache=False)
    num_scored = []
    score = llm.engine.runner.sampler.scorer.score
    llm.engine.runner.sampler.scorer.score = lambda *arguments: num_scored.append(1) or score(*arguments)
    others = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    got = llm.generate([PROMPTS[4], PROMPTS[4], PROMPTS[0]], [others, others, RULES[0]])
    num_tokens = len(PROMPTS[0]) - 1 + len(got[2].outputs[0].token_ids)
    assert len(num_scored) > num_tokens, "it was not preempted within its prompt"
    assert scores_of(got[2]) == scores_of(alone[0])


def test_a_prompt_whose_answer_has_begun_is_not_scored_again():
    scorer = PromptScorer(Scorer(10), lambda part: pytest.fail("scored"), 4)
    for output, has_work in (((), True), ((5,), False)):
        scorer.admit(0, Admission((1, 2, 3), output, SamplingParams(prompt_logprobs=0), 0))
        assert scorer.has_work is has_work


def test_the_scored_rows_of_a_prompt_go_through_the_head_a_few_at_a_time(llm, monkeypatch):
    runner, sizes = llm.engine.runner, []
    forward = runner._forward

    def noted(batch, *rest):
        sizes.append((len(batch.tokens), len(batch.sampled)))
        forward(batch, *rest)

    monkeypatch.setattr(runner, "_forward", noted)
    llm.generate([PROMPTS[3]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert len(runner._scratch.logits) == 32
    assert sizes == [(32, 32), (32, 32), (32, 32), (3, 3), (1, 1)]


def test_a_prompt_whose_logits_are_not_finite_fails_alone(path, monkeypatch):
    llm = llm_over(path)
    runner = llm.engine.runner
    all_logits = runner._prompts._all_logits

    def sick(part):
        logits = all_logits(part)
        logits[0, 5] = np.nan
        return logits

    monkeypatch.setattr(runner._prompts, "_all_logits", sick)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    bad, good = llm.generate([PROMPTS[0], PROMPTS[0]], [RULES[0], plain])
    assert bad.outputs[0].error == NOT_FINITE_MESSAGE
    assert (len(good.outputs[0].token_ids), good.outputs[0].error) == (4, None)


def test_padding_columns_are_never_among_the_likeliest(llm):
    (got,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3, temperature=0, logprobs=20, ignore_eos=True))
    assert all(token_id < 267 for score in got.outputs[0].logprobs for token_id, _ in score.top)
