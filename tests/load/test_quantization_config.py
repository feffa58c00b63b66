"""AWQ, GPTQ and compressed-tensors mean what an independent reading of their layouts says, or are refused."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kernels.slow_linear import integer_weights
from millpond.errors import ModelFileError
from millpond.kernels.matmul import U4, U8
from millpond.kernels.pack import unpack
from millpond.load.dequantize import dequantize, dequantize_channels, take_rows, to_affine
from millpond.load.integer_tensor import IntegerTensor
from millpond.model.checkpoint import open_checkpoint
from millpond.model.weights import load_weights
from quantised_folders import Checkpoint, awq, compressed_config, gptq, int8, packed_rows

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def rows(bits=4, group=64, symmetric=True, **options):
    config = compressed_config("pack-quantized", bits, group, symmetric)
    pack = partial(packed_rows, bits=bits, symmetric=symmetric)
    return Checkpoint(config, pack, bits, group, symmetric, **options)


CHECKPOINTS = {
    "gptq": Checkpoint(GPTQ, gptq),
    "gptq of 32": Checkpoint({**GPTQ, "group_size": 32}, gptq, group=32),
    "gptq of whole rows": Checkpoint({**GPTQ, "group_size": -1}, gptq, group=-1),
    "gptq v2": Checkpoint({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, minus=0)),
    "gptq, symmetric": Checkpoint({**GPTQ, "sym": True}, gptq, symmetric=True),
    "gptq with biases of zeros": Checkpoint(
        GPTQ, gptq, extra={"model.layers.0.self_attn.o_proj.bias": np.zeros(128, np.float16)}
    ),
    "gptq of qwen2": Checkpoint(GPTQ, gptq, kind="qwen2"),
    "awq": Checkpoint(AWQ, awq),
    "awq of 128": Checkpoint({**AWQ, "group_size": 128}, awq, group=128),
    "awq, older names": Checkpoint(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, awq
    ),
    "awq of phi3": Checkpoint(AWQ, awq, kind="phi3"),
    "W4A16": rows(),
    "W4A16 by channel": rows(group=-1),
    "W4A16, asymmetric": rows(symmetric=False),
    "W8A16": rows(bits=8),
    "W8A8": Checkpoint(compressed_config("int-quantized", 8, -1), int8, 8, -1, True),
    "W8A8 in groups": Checkpoint(compressed_config("int-quantized", 8, 64), int8, 8, 64, True),
}
every_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)


@every_checkpoint
def test_in_float32_the_weights_are_those_of_the_dequantised_checkpoint(checkpoint, tmp_path):
    quantised = open_checkpoint(checkpoint.write(tmp_path / "quantised", plain=tmp_path / "plain"))
    plain = open_checkpoint(tmp_path / "plain")
    assert quantised[1] == plain[1]
    assert np.array_equal(load_weights(*quantised, "float32").room, load_weights(*plain, "float32").room)


@every_checkpoint
def test_the_kernels_hold_them_exactly_where_groups_are_of_64_and_else_as_near_as_integers_can(checkpoint, tmp_path):
    quantised = open_checkpoint(checkpoint.write(tmp_path / "quantised", plain=tmp_path / "plain"))
    weights, exact = load_weights(*quantised, "auto"), load_weights(*open_checkpoint(tmp_path / "plain"), "float32")
    kind = U4 if checkpoint.bits == 4 else U8
    for layer, expected in zip(weights.layers, exact.layers, strict=True):
        for found, right in zip(layer, expected, strict=True):
            assert found.kind == kind
            if checkpoint.group == 32:
                units = integer_weights(found)[1][: found.columns, :, None]
                assert (np.abs(unpack(found) - unpack(right)).reshape(*units.shape[:2], 64) <= 1.06 * units).all()
            else:
                assert np.array_equal(unpack(found), unpack(right))


@every_checkpoint
def test_the_affine_form_some_rows_and_some_channels_are_those_of_the_whole(checkpoint, tmp_path):
    file, _ = open_checkpoint(checkpoint.write(tmp_path))
    tensor = file.tensors["blk.0.ffn_down.weight"]
    assert isinstance(tensor, IntegerTensor)
    whole = dequantize(tensor)
    assert whole.shape == tensor.shape == (128, 128)
    assert np.array_equal(to_affine(tensor).values(), whole)
    some = np.array([77, 3, 4, 127])
    assert np.array_equal(dequantize(take_rows(tensor, some)), whole[some])
    assert np.array_equal(dequantize_channels(tensor, some), whole[:, some])
    assert np.array_equal(dequantize_channels(take_rows(tensor, some), some), whole[np.ix_(some, some)])


def refusal(checkpoint, folder) -> str:
    checkpoint.write(folder)
    with pytest.raises(ModelFileError) as caught:
        load_weights(*open_checkpoint(folder), "auto")
    return str(caught.value)


W8A8 = compressed_config("int-quantized", 8, -1)
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def with_group(config, **changes):
    return {**config, "config_groups": {"group_0": {**config["config_groups"]["group_0"], **changes}}}


REFUSED = {
    "another method": (
        {"quant_method": "bitsandbytes"},
        "'quant_method' is 'bitsandbytes', .* gptq or awq or compressed",
    ),
    "no method": ({"bits": 4}, "'quant_method' is None"),
    "no object": ("gptq", "'quantization_config' must be an object, got 'gptq'"),
    "3 bits": ({**GPTQ, "bits": 3}, "'bits' is 3, which is not supported; supported: 4"),
    "8-bit AWQ": ({**AWQ, "bits": 8}, "'bits' is 8"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin'"),
    "settings for each layer": ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "'dynamic' is"),
    "gemv": ({**AWQ, "version": "gemv"}, "'version' is 'gemv'"),
    "AWQ without zeros": ({**AWQ, "zero_point": False}, "'zero_point' is False"),
    "no group size": ({key: GPTQ[key] for key in GPTQ if key != "group_size"}, "'group_size' is None"),
    "fp8": (compressed_config("float-quantized", 8, -1), "'format' is 'float-quantized'"),
    "float weights": (
        with_group(W8A8, weights={"type": "float", "num_bits": 8, "strategy": "channel"}),
        "'weights' is",
    ),
    "one scale for all": (with_group(W8A8, weights={"num_bits": 8, "strategy": "tensor"}), "'weights' is"),
    "asymmetric bytes": (compressed_config("int-quantized", 8, -1, False), "'symmetric' is False"),
    "static inputs": (with_group(W8A8, input_activations=STATIC), "'input_activations' is .*none, or dynamic 8-bit"),
    "two groups": ({**W8A8, "config_groups": {"a": {}, "b": {}}}, "'config_groups' is"),
    "quantised K/V": ({**W8A8, "kv_cache_scheme": {"num_bits": 8}}, "'kv_cache_scheme' is"),
    "sparse": ({**W8A8, "sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparsity_config' is"),
    "transformed": ({**W8A8, "transform_config": {"config_groups": {"R1": {}}}}, "'transform_config' is"),
    "frozen": ({**W8A8, "quantization_status": "frozen"}, "'quantization_status' is 'frozen'"),
}


@pytest.mark.parametrize(
    ("config", "suffix"), [({**GPTQ, "desc_act": True}, ".qweight"), (AWQ, ".qweight"), (W8A8, ".weight_scale")]
)
def test_a_config_of_quantised_weights_beside_floats_alone_is_refused(config, suffix, tmp_path):
    message = refusal(Checkpoint(config, lambda weight: {"weight": weight.values()}), tmp_path)
    assert f"tensors are floats, and no name ends with {suffix}" in message


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_exact_form_is_refused_by_its_key(config, message, tmp_path):
    assert re.search(message, refusal(Checkpoint(config, gptq), tmp_path))


def changed(pack, **changes):
    """A packing in which some parts are others; None leaves one out."""

    def packed(weight):
        parts = pack(weight)
        for end, change in changes.items():
            part = change(parts[end]) if callable(change) else change
            parts = {key: value for key, value in parts.items() if key != end} | ({} if part is None else {end: part})
        return parts

    return packed


def shuffled(order):
    return np.random.default_rng(0).permutation(order).astype(np.int32)


def with_nan(scales):
    scales = scales.copy()
    scales[0, 0] = np.nan
    return scales


BROKEN = {
    "activation order": ("gptq", {"g_idx": shuffled}, "groups are not of 64 inputs that follow each other .*desc_act"),
    "no zeros": ("gptq", {"qzeros": None}, r"its tensor \.qzeros is missing"),
    "no scales": ("awq", {"scales": None}, r"its tensor \.scales is missing"),
    "scales of another shape": (
        "awq",
        {"scales": lambda a: a[:1]},
        r"\.scales is F16 of shape \(1, 128\), .* \(2, 128\)",
    ),
    "scales that are integers": ("awq", {"scales": lambda a: a.astype(np.int32)}, r"\.scales is I32"),
    "zeros of another shape": (
        "gptq",
        {"qzeros": lambda a: a[:, :3]},
        r"\.qzeros is I32 of shape \(2, 3\), .* \(2, 16\)",
    ),
    "codes in bytes": ("gptq", {"qweight": lambda a: a.astype(np.int8)}, r"\.qweight is I8 of shape"),
    "no codes": ("gptq of whole rows", {"qweight": lambda a: a[:0]}, r"its codes are of shape \(0, 128\), which holds"),
    "codes in a row": ("gptq", {"qweight": lambda a: a.reshape(-1)}, r"\.qweight is I32 of shape"),
    "another order's length": ("gptq", {"g_idx": lambda a: a[:5]}, r"\.g_idx is I32 of shape \(5,\)"),
    "another shape": ("W4A16", {"weight_shape": np.array([7, 128])}, r"\.weight_shape is \(7, 128\), and by its codes"),
    "a shape in floats": ("W4A16", {"weight_shape": np.ones(2, np.float32)}, r"\.weight_shape is F32"),
    "bytes that are floats": ("W8A8", {"weight": lambda a: a.astype(np.float32)}, r"\.weight is F32 of shape"),
    "a scale that is not finite": ("W8A8", {"weight_scale": with_nan}, "has a scale that is not finite"),
    "a zero beyond 4 bits": ("gptq", {"qzeros": lambda a: np.full_like(a, -1)}, "has a zero of 15 and 1 more"),
    "nothing but codes": ("W8A8", {"weight_scale": None}, "is of type I8, which without a quantization_config"),
}


@pytest.mark.parametrize(("name", "changes", "message"), BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not_fit_are_refused_by_tensor(name, changes, message, tmp_path):
    checkpoint = CHECKPOINTS[name]
    said = refusal(replace(checkpoint, pack=changed(checkpoint.pack, **changes)), tmp_path)
    assert re.search(message, said), said
    assert "tensor 'model.layers.0." in said or "tensor 'blk.0." in said


def test_groups_that_are_no_multiples_of_32_are_refused_with_both_numbers(tmp_path):
    said = refusal(Checkpoint({**GPTQ, "group_size": 16}, gptq, group=16), tmp_path)
    assert "128 inputs in groups of 16: what can be run is full groups of a multiple of 32" in said


def test_a_bias_of_integers_is_refused_by_its_type(tmp_path):
    bias = {"model.layers.0.self_attn.o_proj.bias": np.zeros(128, np.int32)}
    said = refusal(Checkpoint(GPTQ, gptq, extra=bias), tmp_path)
    assert "o_proj.bias' is of type I32, which is no type of weights" in said


def test_a_bias_that_is_not_zeros_is_still_refused(tmp_path):
    bias = {"model.layers.0.self_attn.o_proj.bias": np.ones(128, np.float16)}
    assert "'blk.0.attn_output.bias' is not part of a plain llama model" in refusal(
        Checkpoint(GPTQ, gptq, extra=bias), tmp_path
    )
