"""The models that have a name, held to transformers on their dequantised weights. In CI's reference step only."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.core.sampling import SamplingParams
from millpond.lab.evaluation import score_windows, text_tokens
from millpond.llm import LLM
from millpond.load.gguf import open_gguf
from millpond.load.store import resolve
from millpond.text.tokenizer import Tokenizer
from reference import sherlock

pytestmark = [pytest.mark.reference, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = ["The capital of France is", "It was a bright cold day in April, and", "def fibonacci(n):\n", "Ein Fluss ist"]
NUM_TOKENS = 32
LEAST_WINDOWS = 20  # of 255 tokens that count: half a percent of perplexity does not show in a few
MOST_LOSS = 0.005  # of perplexity
MOST_ERROR = 1e-5  # of the largest logit
MOST_ERROR_OF_A_SCORE = 1e-4  # a hundredth of a percent of perplexity


@pytest.fixture(scope="module")
def gemma_path():
    return resolve("gemma3-270m")


@pytest.fixture(scope="module")
def gemma(gemma_path):
    from reference.transformers_gemma import load_gemma

    return load_gemma(gemma_path)


@pytest.fixture(scope="module")
def float32(gemma_path):
    return LLM.from_engine(build_engine(str(gemma_path), EngineConfig(dtype="float32", max_model_len=1024)))


def test_gemma_writes_the_greedy_text_of_transformers(transformers_llama, gemma, float32):
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    for got in float32.generate(PROMPTS, sampling, progress=False):
        expected, _ = transformers_llama.greedy_of(gemma, got.prompt_token_ids, NUM_TOKENS)
        assert got.outputs[0].token_ids == expected, got.prompt


def test_gemma_gives_the_logits_of_transformers_past_its_window(transformers_llama, gemma, float32):
    token_ids = text_tokens(float32.engine.tokenizer, sherlock.TEXT_FILE.read_text(encoding="utf-8"))[:600]
    expected = transformers_llama.logits_of(gemma, token_ids)
    got = float32.engine.runner.logits(token_ids)
    # Its logits go up to 38, where float32 sums in another order differ by 2e-4.
    np.testing.assert_allclose(got, expected, rtol=0, atol=MOST_ERROR * np.abs(expected).max())
    np.testing.assert_array_equal(got.argmax(axis=1), expected.argmax(axis=1))


@pytest.fixture(params=["smollm2", "gemma3-270m"])
def scored(request):
    """A model's name, and what transformers gives it for each window of the text."""
    return request.param, sherlock.load_scores()[request.param]


def test_the_perplexity_of_the_fast_path_is_that_of_transformers(scored):
    name, expected = scored
    engine = build_engine(name, EngineConfig(max_model_len=1024, max_num_seqs=4))
    found = score_windows(engine, sherlock.windows_of(engine.tokenizer), sherlock.PLAN.counted)
    got = [fmean(each) for each in found]
    ratio = math.exp(fmean(expected) - fmean(got))
    print(f"{name}: {math.exp(-fmean(got)):.4f}, transformers {math.exp(-fmean(expected)):.4f}, {ratio:.5f}")
    assert len(got) == len(expected) >= LEAST_WINDOWS
    assert ratio == pytest.approx(1, abs=MOST_LOSS)


def test_the_scores_that_are_kept_are_those_of_transformers(request, scored):
    name, expected = scored
    model = request.getfixturevalue({"smollm2": "exact_model", "gemma3-270m": "gemma"}[name])
    windows = sherlock.windows_of(Tokenizer.from_gguf(open_gguf(resolve(name)).metadata))
    for place in (0, -1):
        assert sherlock.score_of(model, windows[place]) == pytest.approx(expected[place], abs=MOST_ERROR_OF_A_SCORE)
