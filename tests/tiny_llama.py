"""Small random Llama files in GGUF, with every tensor's type as the test wants it and a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from gguf_writer import TensorData, dequantize, quantize, write_gguf

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "a n", "an d", "Ġ a")
NORMAL, CONTROL, UNUSED = 1, 3, 5  # tokenizer.ggml.token_type
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_llama(
    path: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    layers: int = 2,
    ffn: int = 128,
    vocab: int | None = None,
    padding_rows: int = 0,
    types: Mapping[str, str] | None = None,
    tied: bool = True,
    seed: int = 0,
    context_length: int = 512,
    rope_theta: float = 10000.0,
    rms_norm_eps: float = 1e-5,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write a random Llama model and return the float32 tensors that the file holds, under Hugging Face names.

    The hidden size is heads * head_dim. Quantised rows run as integers where that and ffn are multiples of 64.
    `vocab` counts the tokenizer's tokens (267 at least, the default), the embedding has `padding_rows` more. `types`
    maps patterns of GGUF tensor names to ggml type names, the first that matches wins, F32 where none does:
    {"*attn*weight": "Q4_1", "token_embd.weight": "Q8_0"}; norms are always F32. `metadata` is added to the file's own
    and wins; a value of None removes the key. The arrays returned are after rounding to the type, in Hugging Face row
    order ([out, in]; q and k not permuted).
    """
    rng = np.random.default_rng(seed)
    tokens, token_types = vocabulary(vocab)
    weights = random_weights(rng, heads, kv_heads, head_dim, layers, ffn, len(tokens) + padding_rows, tied)
    tensors: dict[str, TensorData] = {}
    reference: dict[str, np.ndarray] = {}
    for name, values in weights.items():
        packed = quantize(values, type_for(name, types or {}))
        reference[hugging_face_name(name)] = dequantize(packed)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            packed = permute_rows(packed, heads if "attn_q" in name else kv_heads)
        tensors[name] = packed
    figures: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny llama",
        "llama.block_count": layers,
        "llama.context_length": context_length,
        "llama.embedding_length": heads * head_dim,
        "llama.feed_forward_length": ffn,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.rope.freq_base": rope_theta,
        "llama.attention.layer_norm_rms_epsilon": rms_norm_eps,
        "llama.vocab_size": len(tokens) + padding_rows,
        "llama.rope.dimension_count": head_dim,
    }
    everything = {**figures, **tokenizer_metadata(tokens, token_types), **(metadata or {})}
    write_gguf(path, {key: value for key, value in everything.items() if value is not None}, tensors)
    return reference


def random_weights(
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    ffn: int,
    rows: int,
    tied: bool,
) -> dict[str, np.ndarray]:
    """Float32 tensors under their GGUF names, in Hugging Face row order, scaled so that activations stay near 1."""
    hidden = heads * head_dim

    def linear(num_out: int, num_in: int) -> np.ndarray:
        return (rng.standard_normal((num_out, num_in)) / np.sqrt(num_in)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1.0 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    weights = {"token_embd.weight": rng.standard_normal((rows, hidden)).astype(np.float32)}
    for layer in range(layers):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.ffn_down.weight": linear(hidden, ffn),
            f"blk.{layer}.ffn_gate.weight": linear(ffn, hidden),
            f"blk.{layer}.ffn_up.weight": linear(ffn, hidden),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.attn_k.weight": linear(kv_heads * head_dim, hidden),
            f"blk.{layer}.attn_output.weight": linear(hidden, hidden),
            f"blk.{layer}.attn_q.weight": linear(hidden, hidden),
            f"blk.{layer}.attn_v.weight": linear(kv_heads * head_dim, hidden),
        }
    weights["output_norm.weight"] = norm()
    if not tied:
        weights["output.weight"] = linear(rows, hidden)
    return weights


def permute_rows(tensor: TensorData, heads: int) -> TensorData:
    """The row order of attn_q and attn_k in a llama-type file: within a head, the two halves that rope pairs
    are interleaved, so file row 2*i + half is Hugging Face row half * head_dim/2 + i."""
    rows = tensor.shape[0]
    order = np.arange(rows).reshape(heads, 2, rows // heads // 2).transpose(0, 2, 1).ravel()
    packed = np.frombuffer(tensor.data, dtype=np.uint8).reshape(rows, -1)
    return TensorData(tensor.shape, tensor.type_id, packed[order].tobytes())


def type_for(name: str, types: Mapping[str, str]) -> str:
    if name.endswith("norm.weight"):
        return "F32"
    return next((kind for pattern, kind in types.items() if fnmatchcase(name, pattern)), "F32")


def hugging_face_name(name: str) -> str:
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    parts = {
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
    if name in whole:
        return whole[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{parts[part]}.weight"


def byte_letters() -> list[str]:
    """GPT-2's letter for each of the 256 bytes: itself where it prints, else the next free one from U+0100."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in prints else chr(next(spare)) for byte in range(256)]


def vocabulary(vocab: int | None = None) -> tuple[list[str], list[int]]:
    """Tokens and types: the special tokens, the 256 bytes, the merges' products, then unused ones up to `vocab`."""
    tokens = [*SPECIAL_TOKENS, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    types = [CONTROL] * len(SPECIAL_TOKENS) + [NORMAL] * (len(tokens) - len(SPECIAL_TOKENS))
    missing = (len(tokens) if vocab is None else vocab) - len(tokens)
    if missing < 0:
        raise ValueError(f"vocab must be at least {len(tokens)}, got {vocab}")
    tokens.extend(f"<|unused_{index}|>" for index in range(missing))
    return tokens, types + [UNUSED] * missing


def tokenizer_metadata(tokens: list[str], token_types: list[int]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
