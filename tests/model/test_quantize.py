"""Checkpoints that are not quantised are packed in 8 or 4 bits on request, as near as those can be."""

import numpy as np
import pytest

from gguf_writer import dequantize as by_gguf
from gguf_writer import quantize
from kernels.slow_linear import integer_weights
from millpond.errors import ConfigError
from millpond.kernels.matmul import BF16, F32_WEIGHTS, U4, U8
from millpond.kernels.pack import unpack
from millpond.load.gguf import open_gguf
from millpond.model.checkpoint import open_checkpoint, read_figures
from millpond.model.quantize import quantize_4_bit
from millpond.model.weights import load_weights
from tiny_llama import write_tiny_llama
from tiny_models import tiny_model
from tiny_runner import tiny_runner

QKV, OUT, GATE_UP, DOWN = range(4)


def weights_like_a_models(seed=0, rows=96, depth=256):
    """Normal with a spread of scales, and some outliers."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, depth)) * np.exp(rng.standard_normal((rows, 1)))
    weights[rng.random(weights.shape) < 0.01] *= 4
    return weights.astype(np.float32)


def test_4_bits_are_nearer_than_llama_cpps_plainest_form_of_as_many_bits():
    weights = weights_like_a_models()
    ours, theirs = quantize_4_bit(weights).values(), by_gguf(quantize(weights, "Q4_1"))
    error, plain = (((each - weights) ** 2).sum() for each in (ours, theirs))
    assert error < 0.9 * plain


def test_what_4_bits_hold_comes_back_and_codes_are_4_bits():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (8, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weights = (0.25 * codes - 1.5).astype(np.float32)
    affine = quantize_4_bit(weights)
    assert (affine.bits, affine.codes.dtype, affine.codes.max()) == (4, np.uint8, 15)
    np.testing.assert_allclose(affine.values(), weights, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30])
def test_groups_of_one_value_are_that_value(value):
    weights = np.full((2, 64), value, np.float32)
    np.testing.assert_array_equal(quantize_4_bit(weights).values(), weights)


@pytest.fixture
def tiny(tmp_path):
    def write(**options):
        reference = write_tiny_llama(tmp_path / "m.gguf", **{"head_dim": 32, "ffn": 192, "tied": False, **options})
        file = open_gguf(tmp_path / "m.gguf")
        return file, read_figures(file), reference

    return write


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_q8_packs_every_matrix_in_8_bits_within_half_a_unit(tiny, dtype):
    file, config, reference = tiny(types={"*": dtype})
    weights = load_weights(file, config, "auto", "q8")
    assert weights.kinds == {U8}
    down = weights.layers[1][DOWN]
    units = np.repeat(integer_weights(down)[1][: down.columns], 64, axis=1)
    error = np.abs(unpack(down) - reference["model.layers.1.mlp.down_proj.weight"])
    assert (error <= 0.501 * units).all()
    assert error.any()


def test_q4_packs_the_layers_in_4_bits_and_embedding_and_head_in_8(tiny):
    file, config, reference = tiny()
    weights = load_weights(file, config, "auto", "q4")
    assert {each.kind for layer in weights.layers for each in layer} == {U4}
    assert (weights.embedding.kind, weights.head.kind) == (U8, U8)
    down, expected = weights.layers[1][DOWN], reference["model.layers.1.mlp.down_proj.weight"]
    error = ((unpack(down) - expected) ** 2).mean() / (expected**2).mean()
    assert 0 < error < 0.09**2


def test_the_exact_weights_of_outlier_channels_are_the_files(tiny):
    file, config, reference = tiny()
    exact = load_weights(file, config, "auto", "q4").exact
    channels = np.array([5, 100])
    expected = reference["model.layers.0.self_attn.o_proj.weight"][:, channels]
    np.testing.assert_array_equal(exact[OUT](channels), expected)


def test_rows_that_are_no_whole_groups_stay_in_bfloat16(tiny):
    file, config, _ = tiny(ffn=96)
    assert load_weights(file, config, "auto", "q4").layers[0][DOWN].kind == BF16


def test_a_router_of_experts_stays_in_float32(tmp_path):
    sizes = {"moe_intermediate_size": 96, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
    folder = tiny_model("qwen3_moe", config=sizes).write_folder(tmp_path)
    router = load_weights(*open_checkpoint(folder), "auto", "q8").layers[0][2]
    assert router.kind == F32_WEIGHTS


@pytest.mark.parametrize("name", ["*attn_k*", "token_embd*"])
def test_a_checkpoint_that_is_quantised_even_in_part_is_refused_by_tensor_and_type(tiny, name):
    file, config, _ = tiny(types={name: "Q8_0"})
    with pytest.raises(ConfigError, match=r"quantize q4 is for .* in m\.gguf tensor '.*' is of type Q8_0; leave"):
        load_weights(file, config, "auto", "q4")


def test_logits_lose_less_the_more_bits_there_are(tiny):
    file, _, _ = tiny()
    logits = {each: tiny_runner(file.path, quantize=each).logits(range(3, 19)) for each in ("off", "q8", "q4")}
    errors = [np.abs(logits[each] - logits["off"]).mean() / logits["off"].std() for each in ("q8", "q4")]
    assert 0 < errors[0] < 0.02
    assert 3 * errors[0] < errors[1] < 0.3
