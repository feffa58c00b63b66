"""The models that have a name, held to transformers on their dequantised weights. In CI's reference step only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.core.sampling import SamplingParams
from millpond.lab.evaluation import Perplexity, WindowPlan, score_windows, text_tokens
from millpond.llm import LLM
from millpond.load.store import resolve

pytestmark = [pytest.mark.reference, pytest.mark.slow, pytest.mark.timeout(1800)]

TEXT = Path(__file__).parent.parent / "golden" / "sherlock.txt"
PROMPTS = ["The capital of France is", "It was a bright cold day in April, and", "def fibonacci(n):\n", "Ein Fluss ist"]
NUM_TOKENS = 32
PLAN = WindowPlan(context=512)
MOST_LOSS = 0.005  # of perplexity
MOST_ERROR = 1e-5  # of the largest logit


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
    token_ids = text_tokens(float32.engine.tokenizer, TEXT.read_text(encoding="utf-8"))[:600]
    expected = transformers_llama.logits_of(gemma, token_ids)
    got = float32.engine.runner.logits(token_ids)
    # Its logits go up to 38, where float32 sums in another order differ by 2e-4.
    np.testing.assert_allclose(got, expected, rtol=0, atol=MOST_ERROR * np.abs(expected).max())
    np.testing.assert_array_equal(got.argmax(axis=1), expected.argmax(axis=1))


def reference_perplexity(logits_of, model, windows) -> float:
    """Over the tokens of each window that count."""
    logprobs = []
    for window in windows:
        logits = logits_of(model, window)[PLAN.counted.start - 1 : -1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        logprobs += logits[np.arange(len(logits)), window[PLAN.counted.start :]].tolist()
    return Perplexity.of(logprobs).perplexity


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_perplexity_of_the_fast_path_is_that_of_transformers(transformers_llama, name):
    from reference.transformers_gemma import load_gemma

    load = load_gemma if name == "gemma3-270m" else transformers_llama.load_reference
    engine = build_engine(name, EngineConfig(max_model_len=1024, max_num_seqs=4))
    begin = engine.tokenizer.source.begin
    windows = PLAN.cut(text_tokens(engine.tokenizer, TEXT.read_text(encoding="utf-8")))
    found = score_windows(engine, windows, PLAN.counted)
    got = Perplexity.of([logprob for each in found for logprob in each]).perplexity
    model = load(resolve(name), transformers_llama.torch.float32)
    begun = [[*begin, *window[len(begin) :]] for window in windows]
    expected = reference_perplexity(transformers_llama.logits_of, model, begun)
    print(f"{name}: {got:.4f}, transformers {expected:.4f}, {got / expected:.5f}")
    assert got / expected == pytest.approx(1, abs=MOST_LOSS)
