"""Embeddings against the hidden states of a slow forward pass, and the same bits of them however a request ran."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.build import build_engine
from millpond.config import EngineConfig
from millpond.core.sampling import SamplingParams
from millpond.errors import InvalidRequestError
from millpond.lab.fresh_engine import engine_over
from tiny_llama import write_tiny_llama
from tiny_runner import random_tokens

SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
    "threads": 1,
    "audit": True,
    "prefix_cache": False,
}
EMBEDDED = SamplingParams(max_tokens=1, temperature=0, embedding=True)
PROMPTS = {str(count): random_tokens(count, seed=count) for count in (1, 16, 33, 100, 47)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("embeddings") / "tiny.gguf"
    write_tiny_llama(path, head_dim=32, tied=False, metadata={"llama.pooling_type": 3})
    return path


@pytest.fixture(scope="module")
def engine(path):
    return build_engine(str(path), EngineConfig(**SIZES))


def embed(engine, prompts, sampling=EMBEDDED):
    """Float32 vectors by name, of requests that come all at once."""
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, sampling)
    found = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            if output.embedding is not None:
                assert output.request_id not in found
                found[output.request_id] = np.frombuffer(output.embedding, "<f4")
    return found


@pytest.fixture(scope="module")
def alone(engine):
    return {name: embed(engine, {name: prompt})[name] for name, prompt in PROMPTS.items()}


def test_an_embedding_has_the_models_size_and_length_1(engine, alone):
    assert {each.size for each in alone.values()} == {engine.limits.embedding_size}
    assert [np.linalg.norm(each) for each in alone.values()] == pytest.approx([1] * len(alone), abs=1e-6)
    assert not np.allclose(alone["33"], alone["47"], atol=0.1)


def test_the_logits_of_the_last_token_are_the_heads_product_with_it(tmp_path):
    path = tmp_path / "exact.gguf"
    weights = write_tiny_llama(path, head_dim=32, tied=False, metadata={"llama.pooling_type": 3})
    exact = build_engine(str(path), EngineConfig(**SIZES, dtype="float32"))
    head = weights["lm_head.weight"].astype(np.float64)
    for prompt in PROMPTS.values():
        logits = exact.runner.logits(prompt)[-1].astype(np.float64)
        found = embed(exact, {"a": prompt})["a"].astype(np.float64)
        product = head[: logits.size] @ found
        np.testing.assert_allclose(product / np.linalg.norm(product), logits / np.linalg.norm(logits), atol=1e-5)


@pytest.mark.parametrize(
    "sizes", [{}, {"max_num_batched_tokens": 9}, {"num_blocks": 8}, {"prefix_cache": True}], ids=str
)
def test_the_bits_are_the_same_in_any_crowd(engine, alone, sizes):
    other = engine_over(engine, **sizes)
    got = embed(other, {**PROMPTS, **{f"{name} again": prompt for name, prompt in PROMPTS.items()}})
    for name, vector in got.items():
        np.testing.assert_array_equal(vector.view(np.uint32), alone[name.split()[0]].view(np.uint32))


def test_it_comes_once_beside_an_answer_and_its_scores(engine, alone):
    sampling = SamplingParams(max_tokens=5, temperature=0, embedding=True, logprobs=2, ignore_eos=True)
    got = embed(engine, {"33": PROMPTS["33"]}, sampling)
    np.testing.assert_array_equal(got["33"], alone["33"])


def test_who_takes_the_slot_next_gets_none(engine):
    assert embed(engine, {"a": PROMPTS["16"]})
    assert embed(engine, {"b": PROMPTS["16"]}, SamplingParams(max_tokens=3, temperature=0)) == {}


def test_a_language_model_refuses_by_name(tmp_path):
    write_tiny_llama(tmp_path / "plain.gguf", head_dim=32)
    plain = build_engine(str(tmp_path / "plain.gguf"), EngineConfig(**SIZES))
    with pytest.raises(InvalidRequestError, match="makes no embeddings") as caught:
        plain.add_request("a", [5], EMBEDDED)
    assert caught.value.param == "embedding"


def test_another_pooling_is_told_of_and_gives_none(tmp_path):
    write_tiny_llama(tmp_path / "mean.gguf", head_dim=32, metadata={"llama.pooling_type": 1})
    told = []
    engine = build_engine(str(tmp_path / "mean.gguf"), EngineConfig(**SIZES), notify=told.append)
    assert engine.limits.embedding_size == 0
    assert any("'mean', which is not supported" in line for line in told)
