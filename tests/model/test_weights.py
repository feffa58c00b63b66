"""A file's tensors become packed layers: all of them, of the right shape, in the right row order, by their types."""

from dataclasses import replace

import numpy as np
import pytest

import millpond.model.weights as weights_module
from kernels.slow_linear import integer_weights
from millpond.errors import ModelFileError
from millpond.kernels.matmul import BF16, F32_WEIGHTS, U4, U8
from millpond.kernels.pack import round_to_bf16, unpack
from millpond.load.gguf import open_gguf
from millpond.model.figures import figures_of_gguf
from millpond.model.weights import load_weights
from tiny_llama import write_tiny_llama

QKV, OUT, GATE_UP, DOWN = range(4)
FFN = 192  # a unit of gate and up, whose rows are then in the file's order
ALL_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
HF_PARTS = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    OUT: ("self_attn.o_proj",),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    DOWN: ("mlp.down_proj",),
}


class Tiny:
    """A small file, what it holds under Hugging Face names, and its figures."""

    def __init__(self, path, **shape):
        self.reference = write_tiny_llama(path, **{"head_dim": 32, "ffn": FFN, **shape})
        self.file = open_gguf(path)
        self.config = figures_of_gguf(self.file.metadata, self.file.tensors["token_embd.weight"].shape[0])

    def load(self, dtype="auto", **options):
        return load_weights(self.file, self.config, dtype, **options)

    def expected(self, layer, part):
        names = [f"model.layers.{layer}.{name}.weight" for name in HF_PARTS[part]]
        return np.concatenate([self.reference[name] for name in names])

    def without(self, name):
        self.file = replace(self.file, tensors={key: each for key, each in self.file.tensors.items() if key != name})
        return self

    def with_tensor(self, name, like, **changes):
        tensor = replace(self.file.tensors[like], name=name, **changes)
        self.file = replace(self.file, tensors={**self.file.tensors, name: tensor})
        return self


@pytest.fixture
def tiny(tmp_path):
    return lambda **shape: Tiny(tmp_path / "tiny.gguf", **shape)


def assert_as_near_as_integers_can_be(packed, expected):
    """Each weight is within half a unit of its group's scale, or, of 4 bits, within about one."""
    scales = integer_weights(packed)[1][: packed.columns].astype(np.float64)
    error = np.abs(unpack(packed) - expected).reshape(*scales.shape, 64)
    assert (error <= (1.06 if packed.kind == U4 else 0.501) * scales[..., None]).all()


def to_bf16(x):
    return (round_to_bf16(x).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_of_q_and_k_are_put_back_in_order_each_with_its_own_number_of_heads(tiny, kv_heads):
    model = tiny(heads=4, kv_heads=kv_heads)
    weights = model.load("float32")
    for layer in range(2):
        for part in HF_PARTS:
            np.testing.assert_array_equal(unpack(weights.layers[layer][part]), model.expected(layer, part))


@pytest.mark.parametrize("name", ALL_TYPES)
def test_each_tensor_type_holds_the_files_values(tiny, name):
    model = tiny(types={"*": name})
    weights = model.load()
    exact = name not in ("F32", "F16")  # what is not quantised runs in bfloat16
    kind = {"Q4_0": U4, "Q4_1": U4, "Q8_0": U8, "Q5_0": U8, "Q5_1": U8}.get(name, BF16)
    for part in HF_PARTS:
        packed, expected = weights.layers[1][part], model.expected(1, part)
        assert packed.kind == kind
        if kind == BF16:
            np.testing.assert_array_equal(unpack(packed), expected if exact else to_bf16(expected))
        else:
            assert_as_near_as_integers_can_be(packed, expected)
    assert weights.kinds == {kind}


@pytest.mark.parametrize("name", ALL_TYPES)
def test_in_float32_every_type_is_kept_exactly_as_it_dequantises(tiny, name):
    model = tiny(types={"*": name})
    weights = model.load("float32")
    for part in HF_PARTS:
        np.testing.assert_array_equal(unpack(weights.layers[0][part]), model.expected(0, part))
    assert weights.kinds == {F32_WEIGHTS}


@pytest.mark.parametrize(
    ("types", "kind"),
    [
        (("Q4_1", "Q4_0", "Q4_1"), U4),
        (("Q4_1", "Q5_0", "Q4_1"), U8),
        (("Q4_1", "Q4_1", "Q8_0"), U8),
        (("BF16", "F16", "F32"), BF16),
        (("Q4_1", "BF16", "Q4_1"), F32_WEIGHTS),  # neither a group's codes nor bfloat16 holds both
    ],
    ids=str,
)
def test_q_k_and_v_of_different_types_are_one_layer_of_a_kind_that_holds_all(tiny, types, kind):
    model = tiny(types=dict(zip(("*attn_q*", "*attn_k*", "*attn_v*"), types, strict=True)))
    packed = model.load().layers[0][QKV]
    assert packed.kind == kind
    expected = model.expected(0, QKV)
    if kind in (U4, U8):
        assert_as_near_as_integers_can_be(packed, expected)
    else:
        np.testing.assert_array_equal(unpack(packed), to_bf16(expected) if kind == BF16 else expected)


def test_rows_that_are_no_whole_groups_run_in_float32(tiny):
    model = tiny(types={"*": "Q4_1"}, ffn=96)
    weights = model.load()
    kinds = [each.kind for each in weights.layers[0]]
    assert (kinds[QKV], kinds[OUT], kinds[DOWN]) == (U4, U4, F32_WEIGHTS)
    np.testing.assert_array_equal(unpack(weights.layers[0][DOWN]), model.expected(0, DOWN))
    assert len(weights.integer_layers) == len(weights.exact) == 2 * 3 + 1
    assert tiny(types={"*": "Q8_0"}, heads=3, kv_heads=1).load().layers[0][QKV].kind == F32_WEIGHTS


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_any_channels_of_an_integer_layer_are_to_be_had_exactly(tiny, name):
    model = tiny(types={"*": name}, tied=False)
    weights, channels = model.load(), np.array([127, 3, 4, 64])
    parts = [part for _ in range(2) for part in HF_PARTS]
    expected = [model.expected(i // 4, part) for i, part in enumerate(parts)] + [model.reference["lm_head.weight"]]
    for exact, matrix in zip(weights.exact, expected, strict=True):
        np.testing.assert_array_equal(exact(channels), matrix[:, channels])


def test_the_rows_that_fill_up_gate_and_up_have_exact_weights_of_0(tiny):
    model = tiny(types={"*": "Q4_0"}, ffn=128)
    gate, up = np.split(model.expected(0, GATE_UP), 2)
    got = model.load().exact[GATE_UP](np.array([5, 70])).reshape(2, 192, 2)
    np.testing.assert_array_equal(got[:, :128], [gate[:, [5, 70]], up[:, [5, 70]]])
    assert not got[:, 128:].any()


def test_a_weight_beyond_what_integers_can_hold_is_refused_with_its_tensors_name(tiny, monkeypatch):
    monkeypatch.setattr("millpond.kernels.pack.LARGEST_CODE", 1e-6)  # with 126 no file has such a weight
    with pytest.raises(ModelFileError, match=r"tensor 'blk.0.attn_q.weight': a weight of .* is beyond"):
        tiny(types={"*": "Q4_1"}).load()


def test_without_a_head_of_its_own_the_model_holds_its_embedding_once(tiny):
    weights = tiny(tied=True).load()
    assert weights.head is weights.embedding


def test_a_head_of_its_own_is_used_where_there_is_one(tiny):
    model = tiny(tied=False, types={"token_embd.weight": "Q8_0", "output.weight": "Q4_1"})
    weights = model.load()
    assert (weights.embedding.kind, weights.head.kind) == (U8, U4)
    for packed, name in ((weights.embedding, "model.embed_tokens.weight"), (weights.head, "lm_head.weight")):
        assert_as_near_as_integers_can_be(packed, model.reference[name])


def test_norms_are_in_the_order_in_which_the_layers_use_them(tiny):
    model = tiny(layers=3)
    names = [f"model.layers.{i}.{n}.weight" for i in range(3) for n in ("input_layernorm", "post_attention_layernorm")]
    expected = np.stack([model.reference[name] for name in [*names, "model.norm.weight"]])
    np.testing.assert_array_equal(model.load().norms, expected)


@pytest.mark.parametrize(
    "name", ["output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight", "blk.1.attn_norm.weight"]
)
def test_a_missing_tensor_is_refused_by_name(tiny, name):
    with pytest.raises(ModelFileError, match=rf"tiny\.gguf: tensor '{name}' is missing"):
        tiny().without(name).load()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.0.attn_k.weight", (128, 128), (64, 128)),
        ("blk.1.ffn_up.weight", (128, FFN), (FFN, 128)),
        ("output_norm.weight", (1, 128), (128,)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both(tiny, name, shape, expected):
    with pytest.raises(ModelFileError) as refusal:
        tiny().with_tensor(name, like=name, shape=shape).load()
    assert str(refusal.value) == f"tiny.gguf: tensor '{name}' has shape {shape}, expected {expected}"


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("blk.0.attn_q.bias", "output_norm.weight"),
        ("blk.0.attn_q_norm.weight", "output_norm.weight"),
        ("blk.2.attn_q.weight", "blk.0.attn_q.weight"),
        ("output.bias", "output_norm.weight"),
    ],
)
def test_a_tensor_that_would_have_no_effect_is_refused_by_name(tiny, name, like):
    with pytest.raises(ModelFileError, match=f"tensor '{name}' is not part of a plain llama model"):
        tiny().with_tensor(name, like=like).load()


def test_a_head_of_another_shape_is_refused(tiny):
    with pytest.raises(ModelFileError, match=r"'output\.weight' has shape \(128, 267\), expected \(267, 128\)"):
        tiny(tied=False).with_tensor("output.weight", like="output.weight", shape=(128, 267)).load()


def test_every_tensor_is_checked_before_any_is_read(tiny, monkeypatch):
    model = tiny().with_tensor("zzz", like="output_norm.weight")
    monkeypatch.setattr(weights_module.Linear, "pack_into", lambda *args: pytest.fail("a layer was read"))
    with pytest.raises(ModelFileError, match="'zzz' is not part"):
        model.load()
