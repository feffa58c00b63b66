"""Small random models of every architecture: as a folder of Hugging Face and as a GGUF with llama.cpp's conventions.

TINY names them; each is the arguments of `tiny_model`. The conventions are written down here once more, apart from the
code that is tested, with the names of tensors from the `gguf` package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, get_tensor_name_map

from gguf_writer import TensorData, quantize, write_gguf
from tiny_llama import permute_rows, tokenizer_metadata, type_for, vocabulary

HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, USED = 4, 2, 32, 96, 5, 2
WINDOW = 24
GGUF_ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "smollm3": "SMOLLM3",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
    "granite": "GRANITE",
    "olmo2": "OLMO2",
    "qwen3_moe": "QWEN3MOE",
    "olmoe": "OLMOE",
}
PERMUTED = {"llama", "mistral", "smollm3", "granite"}  # those whose GGUF has q and k with their halves in turns
GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class TinyModel:
    """config: its config.json; arrays: float32 by Hugging Face's names; gguf: metadata without the architecture's
    name; tensors: those that only the GGUF has."""

    config: dict[str, Any]
    arrays: dict[str, np.ndarray]
    gguf: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.config["model_type"]

    def write_folder(self, folder: Path, dtype: str = "F32") -> Path:
        """config.json and model.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        write_safetensors(folder / "model.safetensors", self.arrays, dtype)
        return folder

    def write_gguf(self, path: Path, types: Mapping[str, str] | None = None) -> Path:
        """The GGUF that llama.cpp's converter makes of the folder, and a tokenizer; types as for write_tiny_llama."""
        arch = MODEL_ARCH[GGUF_ARCHITECTURES[self.kind]]
        names = get_tensor_name_map(arch, self.config["num_hidden_layers"])
        tensors, stacks = {}, {}
        for name, values in {**self.arrays, **self.tensors}.items():
            if ".experts." in name:
                before, after = name.split(".experts.")
                stacks.setdefault((before, after.split(".")[1]), []).append(values)
                continue
            ours = name if name in self.tensors else names.get_name(name, (".weight", ".bias"))
            assert ours is not None, name
            if self.kind.startswith("gemma") and name.endswith("norm.weight"):
                values = values + np.float32(1)
            packed = quantize(values, type_for(ours, types or {}) if values.ndim > 1 else "F32")
            if self.kind in PERMUTED and ours.endswith(("attn_q.weight", "attn_k.weight")):
                packed = permute_rows(packed, HEADS if "attn_q" in ours else KV_HEADS)
            tensors[ours] = packed
        for (before, part), values in stacks.items():
            ours = f"blk.{before.split('.')[2]}.ffn_{part.removesuffix('_proj')}_exps.weight"
            tensors[ours] = stacked(values, type_for(ours, types or {}))
        arch_name = "llama" if arch is MODEL_ARCH.LLAMA else arch.name.lower()
        figures = {f"{arch_name}.{key}": value for key, value in {**self._common(), **self.gguf}.items()}
        metadata = {"general.architecture": arch_name, **figures, **tokenizer_metadata(*vocabulary())}
        write_gguf(path, metadata, tensors)
        return path

    def _common(self) -> dict[str, Any]:
        config = self.config
        return {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": config["rope_theta"],
            "rope.dimension_count": HEAD_DIM,
        }


def stacked(values: list[np.ndarray], type_name: str) -> TensorData:
    """The matrices of all experts as one tensor."""
    packed = [quantize(each, type_name) for each in values]
    return TensorData((len(values), *values[0].shape), packed[0].type_id, b"".join(each.data for each in packed))


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """A file of one type."""
    header, data = {}, b""
    for name, values in arrays.items():
        raw = quantize(values, dtype).data
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tiny_model(
    kind: str,
    *,
    hidden: int = 128,
    layers: int = 2,
    config: Mapping[str, Any] | None = None,
    gguf: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
) -> TinyModel:
    """A random model of an architecture, by its model_type. config and gguf add to what all have."""
    figures = {
        "model_type": kind,
        "vocab_size": len(vocabulary()[0]),
        "hidden_size": hidden,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": kind.startswith("gemma"),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **(config or {}),
    }
    arrays = random_arrays(np.random.default_rng(seed), kind, hidden, layers, figures)
    return TinyModel(figures, arrays, dict(gguf or {}), dict(tensors or {}))


def random_arrays(
    rng: np.random.Generator, kind: str, hidden: int, layers: int, figures: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face's names, scaled so that activations stay near 1."""
    q, kv, gemma = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, kind.startswith("gemma")

    def linear(num_out: int, num_in: int) -> np.ndarray:
        return (rng.standard_normal((num_out, num_in)) / np.sqrt(num_in)).astype(np.float32)

    def norm(size: int = hidden) -> np.ndarray:
        return (0.0 if gemma else 1.0) + (0.2 * rng.standard_normal(size)).astype(np.float32)

    rows = figures["vocab_size"]
    scale = hidden**-0.5 if gemma or kind == "granite" else 1.0
    arrays = {"model.embed_tokens.weight": scale * rng.standard_normal((rows, hidden)).astype(np.float32)}
    for i in range(layers):
        layer: dict[str, np.ndarray] = {"self_attn.o_proj": linear(hidden, q)}
        if kind == "phi3":
            layer |= {"self_attn.qkv_proj": linear(q + 2 * kv, hidden), "mlp.gate_up_proj": linear(2 * FFN, hidden)}
        else:
            layer |= {f"self_attn.{name}_proj": linear(q if name == "q" else kv, hidden) for name in "qkv"}
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            layer |= {f"self_attn.{name}_norm": norm(HEAD_DIM) for name in "qk"}
        if kind in ("olmo2", "olmoe"):
            layer |= {"self_attn.q_norm": norm(q), "self_attn.k_norm": norm(kv)}
        layer["post_attention_layernorm"] = norm()
        layer |= {} if kind == "olmo2" else {"input_layernorm": norm()}
        layer |= {"post_feedforward_layernorm": norm()} if gemma or kind == "olmo2" else {}
        layer |= {"pre_feedforward_layernorm": norm()} if gemma else {}
        layer |= random_ffn(linear, kind, hidden)
        arrays |= {f"model.layers.{i}.{name}.weight": values for name, values in layer.items()}
        if kind == "qwen2":
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                bias = 0.5 * rng.standard_normal(size).astype(np.float32)
                arrays[f"model.layers.{i}.self_attn.{name}_proj.bias"] = bias
    arrays["model.norm.weight"] = norm()
    if not figures["tie_word_embeddings"]:
        arrays["lm_head.weight"] = linear(rows, hidden)
    return arrays


def random_ffn(linear, kind: str, hidden: int) -> dict[str, np.ndarray]:
    """The FFN of a layer, without ".weight"."""
    if kind == "phi3":  # gate and up are one
        return {"mlp.down_proj": linear(hidden, FFN)}
    sizes = {"gate": (FFN, hidden), "up": (FFN, hidden), "down": (hidden, FFN)}
    if not kind.endswith("moe"):
        return {f"mlp.{name}_proj": linear(*size) for name, size in sizes.items()}
    parts = {"mlp.gate": linear(EXPERTS, hidden)}
    for expert in range(EXPERTS):
        parts |= {f"mlp.experts.{expert}.{name}_proj": linear(*size) for name, size in sizes.items()}
    return parts


def _yarn(name: str = "rope_type") -> dict[str, Any]:
    return {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def llama3_divisors() -> np.ndarray:
    """What the converter puts into rope_freqs.weight for LLAMA3, float32 [HEAD_DIM / 2]."""
    scaling, divisors = LLAMA3, []
    for exponent in np.arange(0, HEAD_DIM, 2) / HEAD_DIM:
        length = 2 * np.pi * 10000.0**exponent
        before = scaling["original_max_position_embeddings"]
        low, high = before / scaling["low_freq_factor"], before / scaling["high_freq_factor"]
        if length < high:
            divisors.append(1.0)
        elif length > low:
            divisors.append(scaling["factor"])
        else:
            smooth = (before / length - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, np.float32)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_GGUF = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama, linear": {
        "kind": "llama",
        "config": {"rope_scaling": {"type": "linear", "factor": 3.0}},
        "gguf": {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    },
    "llama, llama3": {
        "kind": "llama",
        "config": {"rope_scaling": LLAMA3},
        "tensors": {"rope_freqs.weight": llama3_divisors()},
    },
    "llama, yarn": {"kind": "llama", "config": {"rope_scaling": _yarn()}, "gguf": YARN_GGUF},
    "llama, newer config": {
        "kind": "llama",
        "config": {"rope_parameters": {"rope_theta": 10000.0, **_yarn()}},
        "gguf": YARN_GGUF,
    },
    "mistral": {
        "kind": "mistral",
        "config": {"sliding_window": WINDOW},
        "gguf": {"attention.sliding_window": WINDOW},
    },
    "smollm3": {"kind": "smollm3", "layers": 5},
    "qwen2": {"kind": "qwen2"},
    "qwen3": {"kind": "qwen3", "hidden": 96},
    "gemma2": {
        "kind": "gemma2",
        "hidden": 96,
        "layers": 3,
        "config": {
            **GELU,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD_DIM,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        "gguf": {
            "attention.sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    },
    "gemma3": {
        "kind": "gemma3_text",
        "hidden": 96,
        "layers": 7,
        "config": {
            **GELU,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD_DIM,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "gguf": {
            "attention.sliding_window": WINDOW,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    },
    "phi3": {
        "kind": "phi3",
        "config": {"partial_rotary_factor": 0.75},
        "gguf": {"rope.dimension_count": 24},
    },
    "granite": {
        "kind": "granite",
        "config": {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
        },
        "gguf": {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.1, "logit_scale": 3.0},
    },
    "olmo2": {"kind": "olmo2"},
    "qwen3 moe": {
        "kind": "qwen3_moe",
        "config": {
            "num_experts": EXPERTS,
            "num_experts_per_tok": USED,
            "moe_intermediate_size": FFN,
            "norm_topk_prob": True,
        },
        "gguf": {"expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": FFN},
    },
}
