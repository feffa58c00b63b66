"""Gemma 3 as a reference: a GGUF's dequantised float32 weights in Hugging Face transformers. Needs torch."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from reference.transformers_llama import THREADS, read_metadata

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def load_gemma(path: Path, dtype: torch.dtype = torch.float64) -> Gemma3ForCausalLM:
    """The Gemma 3 model of a GGUF file with its weights dequantised to float32, eager attention, in eval mode.

    It computes in dtype, all but the norms and the softmax (see transformers_llama.py).
    """
    torch.set_num_threads(THREADS)
    reader = gguf.GGUFReader(path)
    config = _config(read_metadata(reader), {tensor.name: tensor.shape for tensor in reader.tensors})
    model = Gemma3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    state = dict(_weights(tensor) for tensor in reader.tensors)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    return model.eval().to(dtype)


def _config(metadata: dict, shapes: dict) -> Gemma3TextConfig:
    def value(key):
        return metadata[f"gemma3.{key}"]

    return Gemma3TextConfig(
        vocab_size=int(shapes["token_embd.weight"][1]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        query_pre_attn_scalar=value("attention.key_length"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        sliding_window=value("attention.sliding_window"),
        rope_theta=value("rope.freq_base"),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def _weights(tensor: gguf.ReaderTensor) -> tuple[str, torch.Tensor]:
    """A tensor by transformers' name. A GGUF has the sum of a norm's weights and 1, transformers the weights."""
    values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
    stem = tensor.name.removesuffix(".weight")
    if stem.endswith("norm"):
        values -= np.float32(1)
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight", torch.from_numpy(values)
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", torch.from_numpy(values)
