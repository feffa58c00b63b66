"""Every architecture held to transformers: tiny random models, from safetensors and from a GGUF, in float32."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from millpond.config import EngineConfig
from tiny_models import TINY, WINDOW, tiny_model

pytestmark = [pytest.mark.reference, pytest.mark.slow]

NUM_TOKENS = 75  # four blocks and a part of the fifth; past three windows
MAX_LOGIT_ERROR = 1e-4
SIZES = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 8, "threads": 1}
CHUNKS = (32, 7, 1)  # prefill in one way and another, and decode


@pytest.fixture(scope="session")
def logits_of():
    """A function of a folder and tokens: transformers' logits of every position, float32 [tokens, vocabulary]."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(2)

    def logits(folder, token_ids):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        model = model.eval().to(torch.float64)
        with torch.inference_mode():
            return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float().numpy()

    return logits


def tokens(count: int = NUM_TOKENS) -> list[int]:
    return np.random.default_rng(5).integers(0, 267, count).tolist()


def assert_agrees(runner, expected, chunks=CHUNKS) -> None:
    assert np.abs(expected).std() > 0.1
    for chunk in chunks:
        got = runner.logits(tokens(len(expected)), chunk)
        np.testing.assert_allclose(got, expected, rtol=0, atol=MAX_LOGIT_ERROR, err_msg=f"chunks of {chunk}")


@pytest.mark.parametrize("name", TINY)
def test_a_model_of_each_architecture_gives_the_logits_of_transformers_from_both_formats(
    name, logits_of, build_model_runner, tmp_path
):
    tiny = tiny_model(**TINY[name])
    expected = logits_of(tiny.write_folder(tmp_path / "folder"), tokens())
    assert NUM_TOKENS > 3 * WINDOW
    assert_agrees(build_model_runner(tmp_path / "folder", EngineConfig(**SIZES)), expected)
    if "dynamic" not in name:  # a GGUF cannot say it
        gguf = build_model_runner(tiny.write_gguf(tmp_path / "tiny.gguf"), EngineConfig(**SIZES))
        assert_agrees(gguf, expected)


LONGROPE = {"short_factor": [1.0 + 0.1 * i for i in range(12)], "long_factor": [1.5 + 0.3 * i for i in range(12)]}


@pytest.mark.parametrize(("original", "max_model_len"), [(32, 128), (256, 200)], ids=["long", "short"])
def test_longrope_gives_the_logits_of_transformers(original, max_model_len, logits_of, build_model_runner, tmp_path):
    scale = (1 + np.log(512 / original) / np.log(original)) ** 0.5
    tiny = tiny_model(
        "phi3",
        config={
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": original,
            "rope_scaling": {"type": "longrope", **LONGROPE},
        },
        gguf={
            "rope.dimension_count": 24,
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": float(scale),
        },
        tensors={f"rope_factors_{name}.weight": np.array(LONGROPE[f"{name}_factor"]) for name in ("short", "long")},
    )
    expected = logits_of(tiny.write_folder(tmp_path / "folder"), tokens())
    sizes = EngineConfig(**SIZES, max_model_len=max_model_len)
    for path in (tmp_path / "folder", tiny.write_gguf(tmp_path / "tiny.gguf")):
        assert_agrees(build_model_runner(path, sizes), expected)


@pytest.mark.parametrize("longest", [64, 75], ids=["within the model's length", "beyond it"])
def test_dynamic_scaling_gives_the_logits_of_transformers_for_the_longest_text(
    longest, logits_of, build_model_runner, tmp_path
):
    changes = {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    folder = tiny_model("llama", config=changes).write_folder(tmp_path / "folder")
    expected = logits_of(folder, tokens(longest))
    assert_agrees(build_model_runner(folder, EngineConfig(**SIZES, max_model_len=longest)), expected)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_weights_of_two_bytes_give_the_logits_of_transformers(dtype, logits_of, build_model_runner, tmp_path):
    folder = tiny_model("qwen2").write_folder(tmp_path / "folder", dtype)
    assert_agrees(build_model_runner(folder, EngineConfig(**SIZES)), logits_of(folder, tokens()))


@pytest.mark.parametrize("name", ["gemma3", "phi3", "smollm3", "qwen3 moe", "llama, llama3"])
def test_what_transformers_saves_is_what_it_loaded(name, logits_of, build_model_runner, tmp_path):
    """Newer config.json files have other keys than those that are written here."""
    folder = tiny_model(**TINY[name]).write_folder(tmp_path / "folder")
    model = import_module("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    model.save_pretrained(tmp_path / "saved")
    assert "rope_parameters" in (tmp_path / "saved" / "config.json").read_text()
    assert_agrees(build_model_runner(tmp_path / "saved", EngineConfig(**SIZES)), logits_of(folder, tokens()), (32,))
