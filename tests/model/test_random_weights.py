"""Random weights are packed as a file's would be, and a model of them computes something of its own."""

from dataclasses import replace

import numpy as np
import pytest

from kernels.emit import RUNNABLE_ISAS
from kernels.slow_linear import integer_weights
from millpond.build import build_random_runner
from millpond.config import EngineConfig
from millpond.errors import ConfigError
from millpond.kernels.matmul import F32_WEIGHTS, U4, U8
from millpond.kernels.pack import unpack
from millpond.model.outliers import MOST_OUTLIERS
from millpond.model.random_weights import SHAPES, random_weights, random_weights_bytes
from millpond.model.weights import unit_order
from model import reference_llama
from tiny_runner import random_tokens

# As llama-1b, four query heads to a K/V head of 64, and neither the hidden nor the inner size whole tiles of 48.
SMALL = replace(
    SHAPES["llama-1b"], num_layers=2, hidden_size=256, num_heads=4, num_kv_heads=1, ffn_size=1024, vocab_size=320
)
# Every layer's input is rounded to 8 bits and K/V to bfloat16; measured 0.0211. Two outputs swapped make it 0.1.
MAX_FAST_ERROR = 0.025
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96, "num_blocks": 24, "threads": 1}


def matrices(weights, config, has_outliers):
    """The packed weights as the reference takes them, under its names; has_outliers: their channels have their own."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    order = unit_order(config.ffn_size)
    found = {"model.embed_tokens.weight": unpack(weights.embedding), "model.norm.weight": weights.norms[-1]}
    whole = [with_outliers(each, weights, i) if has_outliers else unpack(each) for i, each in enumerate(weights.packed)]
    found["lm_head.weight"] = whole[-1]
    for i in range(config.num_layers):
        qkv, out, gate_up, down = whole[4 * i : 4 * i + 4]
        q, k, v = np.split(qkv, [heads, heads + kv])
        both = np.zeros((2 * config.ffn_size, config.hidden_size), np.float32)
        both[order[order >= 0]] = gate_up[order >= 0]
        gate, up = np.split(both, 2)
        names = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": out}
        names |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": down}
        names |= {"input_layernorm": weights.norms[2 * i], "post_attention_layernorm": weights.norms[2 * i + 1]}
        found |= {f"model.layers.{i}.{name}.weight": matrix for name, matrix in names.items()}
    return found


def with_outliers(layer, weights, index):
    """The matrix that a layer's inputs meet: the outlier channels' weights are those that stand beside the tiles."""
    matrix = unpack(layer).copy()
    if layer.outliers is not None:
        beside = layer.outliers.transpose(0, 2, 1).reshape(-1, MOST_OUTLIERS)
        matrix[:, weights.outliers[index]] = beside[: layer.columns]
    return matrix


def expected_logits(dtype, tokens, has_outliers=True):
    return reference_llama.logits(
        matrices(random_weights(SMALL, dtype), SMALL, has_outliers),
        tokens,
        heads=SMALL.num_heads,
        kv_heads=SMALL.num_kv_heads,
        layers=SMALL.num_layers,
        rope_theta=SMALL.ropes[0].theta,
    )


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_a_small_llama_of_random_weights_computes_what_the_plain_forward_pass_does(isa):
    tokens = random_tokens(75)
    got = build_random_runner(SMALL, EngineConfig(isa=isa, **SIZES)).logits(tokens)
    expected = expected_logits("auto", tokens, has_outliers=isa != "amx")
    assert (got - expected).std() < MAX_FAST_ERROR * expected.std()


def test_in_float32_it_is_as_exact_as_a_file_is():
    tokens = random_tokens(75)
    runner = build_random_runner(SMALL, EngineConfig(dtype="float32", **SIZES))
    np.testing.assert_allclose(runner.logits(tokens), expected_logits("float32", tokens), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(("dtype", "kinds"), [("auto", [U4] * 8 + [U8]), ("float32", [F32_WEIGHTS] * 9)])
def test_layers_are_of_4_bits_and_the_head_of_8_or_all_are_float32(dtype, kinds):
    weights = random_weights(SMALL, dtype)
    assert [each.kind for each in weights.packed] == kinds
    assert weights.head is weights.embedding
    assert weights.room.nbytes == random_weights_bytes(SMALL, dtype)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_have_mean_0_and_a_variance_of_one_over_the_inputs(dtype):
    for layer in random_weights(SMALL, dtype).packed:
        values = unpack(layer)
        assert abs(values.mean()) * layer.depth**0.5 < 0.03
        assert values.var() * layer.depth == pytest.approx(1, abs=0.05)


def test_no_code_is_0_which_not_all_kernels_take():
    for layer in random_weights(SMALL, "auto").packed:
        assert integer_weights(layer)[0].min() >= 1


def test_every_integer_layer_has_the_most_outlier_channels_each_once():
    weights = random_weights(SMALL, "auto")
    for layer, channels in zip(weights.packed, weights.outliers, strict=True):
        assert len(set(channels.tolist())) == MOST_OUTLIERS
        assert channels.min() >= 0
        assert channels.max() < layer.depth


def test_the_same_seed_makes_the_same_weights_and_another_one_others():
    first, again, other = (random_weights(SMALL, "auto", seed).room for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5


def test_the_shapes_are_those_of_their_models():
    assert 902e6 < random_weights_bytes(SHAPES["llama-1b"], "auto") < 903e6
    assert 102e6 < random_weights_bytes(SHAPES["smollm2-135m"], "auto") < 103e6


def test_weights_that_the_memory_has_no_room_for_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr("millpond.build.available_memory", lambda: 1000)
    monkeypatch.setattr("millpond.build.random_weights", lambda *arguments: pytest.fail("made"))
    with pytest.raises(ConfigError, match="but 1000 are available"):
        build_random_runner(SMALL, EngineConfig(**SIZES))
