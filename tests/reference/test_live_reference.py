"""The product's logits and greedy tokens held to transformers as it runs here. In CI's reference step only."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from millpond.config import EngineConfig
from millpond.load.gguf import open_gguf
from millpond.text.tokenizer import Tokenizer
from reference import golden
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.reference, pytest.mark.slow]

FLOAT32 = EngineConfig(dtype="float32", max_model_len=512)
TINY = EngineConfig(dtype="float32", max_num_seqs=4, max_num_batched_tokens=32, num_blocks=8)
NUM_TINY_TOKENS = 75  # four blocks and a part of the fifth

SHAPES = {
    "grouped heads": {"heads": 4, "kv_heads": 2, "head_dim": 32},
    "one K/V head per head": {"heads": 4, "kv_heads": 4, "head_dim": 32},
    "one K/V head for all": {"heads": 8, "kv_heads": 1, "head_dim": 16},
    "three heads to a K/V head of 64": {"heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 160},
    "heads of 80": {"heads": 4, "kv_heads": 2, "head_dim": 80},
    "heads of 128": {"heads": 2, "kv_heads": 1, "head_dim": 128},
    "a head of its own": {"head_dim": 32, "tied": False},
    "padding rows in the embedding": {"head_dim": 32, "padding_rows": 5},
    "a wide vocabulary": {"head_dim": 32, "vocab": 1003},
    "other rope base and epsilon": {"head_dim": 64, "rope_theta": 500000.0, "rms_norm_eps": 1e-3},
    "positions scaled": {
        "head_dim": 32,
        "metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    },
}
TYPES = {
    **{name: {"*": name} for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")},
    "a type for each part": {
        "*attn_q*": "Q4_1",
        "*attn_k*": "Q5_0",
        "*attn_v*": "Q8_0",
        "*attn_output*": "BF16",
        "*ffn_gate*": "F16",
        "*ffn_up*": "Q4_0",
        "*ffn_down*": "Q5_1",
        "token_embd.weight": "Q8_0",
    },
}


@pytest.fixture(scope="session")
def float32_runner(build_model_runner, demo_path):
    return build_model_runner(demo_path, FLOAT32)


@dataclass(frozen=True, slots=True)
class Demo:
    """A prompt with its greedy continuation, all but the last token, and what transformers says after each token."""

    prompt: golden.PromptGolden
    token_ids: list[int]
    expected: NDArray[np.float32]


@pytest.fixture(scope="module", params=golden.load_prompts(), ids=lambda prompt: prompt.name)
def demo(request, transformers_llama, exact_model):
    token_ids = [*request.param.token_ids.tolist(), *request.param.greedy_token_ids[:-1].tolist()]
    return Demo(request.param, token_ids, transformers_llama.logits_of(exact_model, token_ids))


def tiny_tokens(seed: int, vocab: int = 267) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, NUM_TINY_TOKENS).tolist()


def assert_tiny_agrees(transformers_llama, build_model_runner, path, chunk: int | None = None) -> None:
    token_ids = tiny_tokens(seed=5)
    logits = build_model_runner(path, TINY).logits(token_ids, chunk)
    expected = transformers_llama.logits_of(transformers_llama.load_reference(path), token_ids)
    # A random model with a tied head gives a token itself a logit of several hundred, where float32 is no finer.
    np.testing.assert_allclose(logits, expected[:, : logits.shape[1]], rtol=1e-6, atol=golden.MAX_LOGIT_ERROR)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_model_of_each_shape_gives_the_logits_of_transformers(
    transformers_llama, build_model_runner, tmp_path, shape
):
    write_tiny_llama(tmp_path / "tiny.gguf", **shape)
    assert_tiny_agrees(transformers_llama, build_model_runner, tmp_path / "tiny.gguf")


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_a_model_of_each_tensor_type_gives_the_logits_of_transformers(
    transformers_llama, build_model_runner, tmp_path, types, tied
):
    write_tiny_llama(tmp_path / "tiny.gguf", head_dim=32, types=types, tied=tied)
    assert_tiny_agrees(transformers_llama, build_model_runner, tmp_path / "tiny.gguf")


@pytest.mark.parametrize("chunk", [1, 7, 16, 32])
def test_a_prompt_in_chunks_gives_the_logits_of_transformers(transformers_llama, build_model_runner, tmp_path, chunk):
    write_tiny_llama(tmp_path / "tiny.gguf", head_dim=32)
    assert_tiny_agrees(transformers_llama, build_model_runner, tmp_path / "tiny.gguf", chunk)


def test_the_files_own_weights_are_what_the_reference_runs_on(transformers_llama, tmp_path):
    weights = write_tiny_llama(tmp_path / "tiny.gguf", head_dim=32, types=TYPES["a type for each part"], tied=False)
    state = transformers_llama.load_reference(tmp_path / "tiny.gguf").state_dict()
    assert state.keys() == weights.keys()
    for name, expected in weights.items():
        np.testing.assert_array_equal(state[name].numpy(), expected, err_msg=name)


def test_the_golden_prompts_are_the_files_own_tokens(demo_path):
    tokenizer = Tokenizer.from_gguf(open_gguf(demo_path).metadata)
    texts = {prompt["name"]: prompt["text"] for prompt in json.loads(golden.TEXTS_FILE.read_text(encoding="utf-8"))}
    for prompt in golden.load_prompts():
        assert tokenizer.encode(texts[prompt.name]) == prompt.token_ids.tolist()


def test_the_golden_logits_are_those_of_transformers(demo):
    assert golden.compare_logits(demo.prompt, demo.expected[: len(demo.prompt.token_ids)]) < golden.MAX_LOGIT_ERROR / 2


def test_the_demo_model_gives_the_logits_of_transformers_at_every_position(float32_runner, demo):
    logits = float32_runner.logits(demo.token_ids)
    np.testing.assert_allclose(logits, demo.expected, rtol=0, atol=golden.MAX_LOGIT_ERROR)


def test_the_demo_model_writes_the_greedy_text_of_transformers_token_by_token(float32_runner, demo):
    """Where every next token is the most likely one after those before it, the text is the greedy text."""
    greedy = demo.prompt.greedy_token_ids.tolist()
    assert demo.expected[-len(greedy) :].argmax(axis=1).tolist() == greedy
    assert float32_runner.logits(demo.token_ids, 1)[-len(greedy) :].argmax(axis=1).tolist() == greedy


@pytest.mark.timeout(600)
def test_the_quantised_path_stays_close_to_transformers_over_the_text(
    transformers_llama, build_model_runner, demo_path
):
    token_ids = golden.load_text().token_ids
    logits = build_model_runner(demo_path, EngineConfig(max_model_len=2048)).logits(token_ids.tolist())
    model = transformers_llama.load_reference(demo_path, transformers_llama.torch.float32)
    measured = golden.full_quality(token_ids, transformers_llama.logits_of(model, token_ids.tolist()), logits)
    print(measured)
    assert measured.top1_agreement >= golden.MIN_TOP1_AGREEMENT
    assert measured.kl_mean <= golden.MAX_KL_MEAN
