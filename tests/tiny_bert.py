"""A small random BERT: as a folder of Hugging Face, as sentence-transformers keeps it, and as llama.cpp's GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, get_tensor_name_map

from gguf_writer import quantize, write_gguf
from tiny_llama import type_for
from tiny_models import write_safetensors
from tiny_wordpiece import learnt, wordpiece_metadata, write_folder

TOKENIZER = "bert, lower case"
HIDDEN, LAYERS, HEADS, FFN, CONTEXT, TYPES = 128, 2, 4, 256, 96, 2
VOCAB = learnt(TOKENIZER).get_vocab_size()
EPSILON = 1e-12
CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "layer_norm_eps": EPSILON,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "position_embedding_type": "absolute",
    "type_vocab_size": TYPES,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
POOLING_TYPES = {"mean": 1, "cls": 2, "last": 3}
POOLER = (("weight", (HIDDEN, HIDDEN)), ("bias", (HIDDEN,)))
STEPS = ((1, "Pooling"), (2, "Normalize"))
SWITCHES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}


def random_bert(seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face's names; every norm, bias and table is such that leaving it out would show."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}

    def table(name: str, rows: int, scale: float) -> None:
        arrays[f"embeddings.{name}_embeddings.weight"] = scale * rng.standard_normal((rows, HIDDEN))

    def linear(name: str, rows: int, depth: int) -> None:
        arrays[f"{name}.weight"] = rng.standard_normal((rows, depth)) / np.sqrt(depth)
        arrays[f"{name}.bias"] = 0.3 * rng.standard_normal(rows)

    def norm(name: str) -> None:
        arrays[f"{name}.LayerNorm.weight"] = 1 + 0.2 * rng.standard_normal(HIDDEN)
        arrays[f"{name}.LayerNorm.bias"] = 0.2 * rng.standard_normal(HIDDEN)

    table("word", VOCAB, 1.0)
    table("position", CONTEXT, 0.7)
    table("token_type", TYPES, 0.5)
    norm("embeddings")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", HIDDEN, HIDDEN)
        linear(f"{layer}.attention.output.dense", HIDDEN, HIDDEN)
        norm(f"{layer}.attention.output")
        linear(f"{layer}.intermediate.dense", FFN, HIDDEN)
        linear(f"{layer}.output.dense", HIDDEN, FFN)
        norm(f"{layer}.output")
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def write_bert_folder(
    folder: Path, pooling: str | None = "mean", *, prefix: str = "", config: Mapping[str, Any] | None = None
) -> Path:
    """With what a file may hold beside the encoder: a pooler, and with a prefix the head of a masked model."""
    write_folder(TOKENIZER, folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    arrays = {prefix + name: values for name, values in random_bert().items()}
    arrays |= {f"{prefix}pooler.dense.{kind}": np.ones(shape, np.float32) for kind, shape in POOLER}
    if prefix:
        arrays["cls.predictions.bias"] = np.ones(VOCAB, np.float32)
    write_safetensors(folder / "model.safetensors", arrays)
    if pooling is not None:
        modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
        modules += [{"type": f"sentence_transformers.models.{name}", "path": f"{i}_{name}"} for i, name in STEPS]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        settings = {switch: kind == pooling for kind, switch in SWITCHES.items()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return folder


def bert_metadata(pooling: str | None = "mean") -> dict[str, Any]:
    """A GGUF's, without its tokenizer."""
    figures: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.layer_norm_epsilon": EPSILON,
        "attention.causal": False,
    }
    if pooling is not None:
        figures["pooling_type"] = POOLING_TYPES[pooling]
    return {"general.architecture": "bert", **{f"bert.{key}": value for key, value in figures.items()}}


def write_bert_gguf(
    path: Path,
    pooling: str | None = "mean",
    *,
    types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """types as for write_tiny_llama; metadata and arrays in place of its own."""
    names = get_tensor_name_map(MODEL_ARCH.BERT, LAYERS)
    tensors = {}
    for name, values in (arrays or random_bert()).items():
        ours = names.get_name(name, (".weight", ".bias"))
        assert ours is not None, name
        is_matrix = values.ndim > 1 and not ours.startswith(("position_embd", "token_types"))
        tensors[ours] = quantize(values, type_for(ours, types or {}) if is_matrix else "F32")
    everything = {**bert_metadata(pooling), **wordpiece_metadata(TOKENIZER), **(metadata or {})}
    write_gguf(path, everything, tensors)
    return path
