"""Weights are packed some rows after some rows: with progress, and in little more memory than they take themselves."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import millpond.model.weights as weights_module
from kernels.slow_linear import integer_weights
from load.random_blocks import random_tensor
from millpond.kernels.matmul import U4, U8
from millpond.kernels.pack import unpack
from millpond.load.dequantize import FLOATS, code_bits, dequantize
from millpond.load.ggml_types import SUPPORTED, GGMLType
from millpond.load.gguf import open_gguf
from millpond.model.checkpoint import open_checkpoint, read_figures
from millpond.model.weights import load_weights
from quantised_folders import Checkpoint, gptq
from tiny_llama import write_tiny_llama

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
QUANTISED = [kind for kind in SUPPORTED if kind not in FLOATS]
DOWN = 3


def opened(path, **options):
    write_tiny_llama(path, **options)
    file = open_gguf(path)
    return file, read_figures(file)


@pytest.mark.parametrize("kind", QUANTISED, ids=[kind.name for kind in QUANTISED])
def test_a_matrix_of_every_type_is_packed_as_near_as_integers_can_be(tmp_path, kind):
    file, config = opened(tmp_path / "m.gguf", head_dim=64, ffn=256, layers=1)
    name = "blk.0.ffn_down.weight"
    tensor = replace(random_tensor(kind, 256, 256, largest=0.1), name=name)
    file = replace(file, tensors={**file.tensors, name: tensor})
    down = load_weights(file, config, "auto").layers[0][DOWN]
    assert down.kind == (U4 if code_bits(tensor) == 4 else U8)
    units = np.repeat(integer_weights(down)[1].astype(np.float64), 64, axis=1)[:256]
    error = np.abs(unpack(down) - dequantize(tensor))
    assert (error <= (1.06 if down.kind == U4 else 0.501) * units).all()
    exact = load_weights(file, config, "float32").layers[0][DOWN]
    assert np.array_equal(unpack(exact), dequantize(tensor))


def test_a_layer_of_4_bit_and_6_bit_super_blocks_is_one_of_8_bits(tmp_path):
    file, config = opened(tmp_path / "m.gguf", head_dim=64, ffn=256, layers=1)
    tensors = dict(file.tensors)
    for part, kind in (("q", GGMLType.Q4_K), ("k", GGMLType.Q4_K), ("v", GGMLType.Q6_K)):
        name = f"blk.0.attn_{part}.weight"
        tensors[name] = replace(random_tensor(kind, tensors[name].shape[0], 256, largest=0.1), name=name)
    qkv = load_weights(replace(file, tensors=tensors), config, "auto").layers[0][0]
    assert qkv.kind == U8
    values = np.concatenate([dequantize(tensors[f"blk.0.attn_{part}.weight"]) for part in "qkv"])
    exact = values[weights_module.qkv_order(config)]
    units = np.repeat(integer_weights(qkv)[1], 64, axis=1)[: len(exact)]
    assert (np.abs(unpack(qkv) - exact) <= 0.501 * units).all()


@pytest.mark.parametrize("at_once", [1, 96 * 128])
@pytest.mark.parametrize("types", [{"*attn_v*": "Q8_0", "*": "Q4_1"}, {"*": "BF16"}], ids=str)
def test_the_bits_are_the_same_however_many_rows_go_together(tmp_path, monkeypatch, at_once, types):
    file, config = opened(tmp_path / "m.gguf", head_dim=32, types=types)
    whole = load_weights(file, config, "auto").room
    monkeypatch.setattr("millpond.kernels.pack.VALUES_AT_ONCE", at_once)
    assert np.array_equal(load_weights(file, config, "auto").room, whole)


CASES = {
    "Q4_1": ({"*": "Q4_1"}, "auto", "off"),
    "Q5_0": ({"*": "Q5_0"}, "auto", "off"),
    "in float32": ({"*": "Q4_1"}, "float32", "off"),
    "bfloat16": ({"*": "BF16"}, "auto", "off"),
    "float32 in 8 bits": ({}, "auto", "q8"),
    "float32 in 4 bits": ({}, "auto", "q4"),
}


@pytest.mark.parametrize(("types", "dtype", "quantize"), CASES.values(), ids=CASES)
def test_memory_is_at_most_the_packed_weights_and_one_tensor(tmp_path, types, dtype, quantize):
    file, config = opened(
        tmp_path / "m.gguf", head_dim=64, ffn=2048, layers=3, vocab=8192, types=types, context_length=64
    )
    load_weights(file, config, dtype, quantize)  # what is imported on the way is no part of it
    largest = max(4 * np.prod(tensor.shape) for tensor in file.tensors.values())
    tracemalloc.start()
    weights = load_weights(file, config, dtype, quantize)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert weights.room.nbytes < peak <= weights.room.nbytes + largest


def test_memory_of_a_gptq_checkpoint_is_so_too(tmp_path):
    folder = Checkpoint(GPTQ, gptq, hidden=512, ffn=2048, vocab=8192).write(tmp_path)
    file, config = open_checkpoint(folder)
    load_weights(file, config, "auto")
    tracemalloc.start()
    weights = load_weights(file, config, "auto")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = max(4 * np.prod(tensor.shape) for tensor in file.tensors.values())
    assert weights.room.nbytes < peak <= weights.room.nbytes + largest


def test_progress_hears_of_the_packed_bytes_in_order_and_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module, "TOLD_BYTES", 1 << 14)
    file, config = opened(tmp_path / "m.gguf", head_dim=32, types={"*": "Q8_0"})
    told = []
    weights = load_weights(file, config, "auto", progress=lambda *words: told.append(words))
    done = [each for each, _, _ in told]
    assert len(told) > 5
    assert done == sorted(set(done))
    assert 0.8 * weights.room.nbytes < done[-1] <= weights.room.nbytes
    assert {words[1:] for words in told} == {(weights.room.nbytes, "packing m.gguf")}
