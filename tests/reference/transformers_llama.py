"""The reference model: a GGUF's dequantised float32 weights in Hugging Face transformers. Needs torch."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

THREADS = 2  # torch would take the host's count, which is not what this process may use

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def read_metadata(reader: gguf.GGUFReader) -> dict:
    """Every metadata key of the file with its value."""
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def load_reference(path: Path, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """The Llama model of a GGUF file with its weights dequantised to float32, eager attention, in eval mode.

    It computes in float64, all but the norms and the softmax, unless dtype says otherwise. Two float32 forward passes
    of a deep model differ by about 1e-4 in places by the order of their sums alone: one cannot hold the other to that.
    """
    torch.set_num_threads(THREADS)
    reader = gguf.GGUFReader(path)
    config = _config(read_metadata(reader), {tensor.name: tensor.shape for tensor in reader.tensors})
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = model.to_empty(device="cpu")
    model.load_state_dict(_state_dict(reader, config), strict=True, assign=True)
    model.tie_weights()
    # to_empty leaves the rotary frequencies, which no checkpoint holds, unset.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval().to(dtype)


def logits_of(model: LlamaForCausalLM, token_ids) -> np.ndarray:
    """Logits of every position of one sequence: float32 [len(token_ids), vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float().numpy()


def hidden_states_of(model: LlamaForCausalLM, token_ids) -> np.ndarray:
    """Residual stream: float32 [layers + 1, len, hidden]: the embedding, then after each layer.

    The last entry is what transformers returns: after the final norm.
    """
    with torch.inference_mode():
        output = model(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True)
    return torch.stack(output.hidden_states)[:, 0].float().numpy()


def greedy_of(model: LlamaForCausalLM, token_ids, num_tokens: int) -> tuple[list[int], np.ndarray]:
    """The most likely continuation, end tokens not stopping it, and each step's top-1 minus top-2 logit."""
    prompt = torch.tensor([list(token_ids)])
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    with torch.inference_mode():
        result = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    top = torch.topk(torch.stack(result.logits)[:, 0], 2).values.float().numpy()
    return result.sequences[0, prompt.shape[1] :].tolist(), top[:, 0] - top[:, 1]


def _config(metadata: dict, shapes: dict) -> LlamaConfig:
    def value(key, default=None):
        return metadata.get(f"llama.{key}", default)

    heads = value("attention.head_count")
    scaling = {"rope_type": "default"}
    if value("rope.scaling.type") == "linear":
        scaling = {"rope_type": "linear", "factor": value("rope.scaling.factor")}
    return LlamaConfig(
        vocab_size=int(shapes["token_embd.weight"][1]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=value("attention.head_count_kv", heads),
        head_dim=value("attention.key_length", value("embedding_length") // heads),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_theta": value("rope.freq_base", 10000.0), **scaling},
        tie_word_embeddings="output.weight" not in shapes,
        bos_token_id=None,
        eos_token_id=None,
    )


def _state_dict(reader: gguf.GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    head_counts = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weights = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem in _TOP_NAMES:
            state[f"{_TOP_NAMES[stem]}.weight"] = torch.from_numpy(weights)
            continue
        _, layer, part = stem.split(".")
        if part in head_counts:
            weights = _rows_in_order(weights, head_counts[part])
        state[f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"] = torch.from_numpy(weights)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _rows_in_order(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undo the file's row order: it interleaves the two halves that rotate together, transformers keeps them apart."""
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
