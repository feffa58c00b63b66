"""The Llama forward pass as its paper writes it, slow and plain: numpy in float64 on float32 weights, no cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Weights = Mapping[str, NDArray[np.float32]]  # under Hugging Face names, rows in Hugging Face order


def logits(
    weights: Weights,
    token_ids: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    layers: int,
    epsilon: float = 1e-5,
    rope_theta: float = 10000.0,
    rope_scale: float = 1.0,
    rope_factors: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """Logits of every position of one sequence: [len(token_ids), rows of the embedding]."""
    embedding = weights["model.embed_tokens.weight"].astype(np.float64)
    x = embedding[list(token_ids)]
    for i in range(layers):
        part = {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"model.layers.{i}.")}
        normed = norm(x, part["input_layernorm.weight"], epsilon)
        q = split(normed, part["self_attn.q_proj.weight"], heads)
        k = split(normed, part["self_attn.k_proj.weight"], kv_heads)
        v = split(normed, part["self_attn.v_proj.weight"], kv_heads)
        angles = rotation_angles(len(x), q.shape[-1], rope_theta, rope_scale, rope_factors)
        attended = attention(rotate(q, angles), rotate(k, angles), v)
        x = x + attended @ part["self_attn.o_proj.weight"].T
        normed = norm(x, part["post_attention_layernorm.weight"], epsilon)
        gate, up = normed @ part["mlp.gate_proj.weight"].T, normed @ part["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ part["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).astype(np.float64)
    return norm(x, weights["model.norm.weight"], epsilon) @ head.T


def norm(x, gain, epsilon):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * gain


def split(x, matrix, heads):
    """x @ matrix.T by heads: [heads, positions, head_dim]."""
    return (x @ matrix.T.astype(np.float64)).reshape(len(x), heads, -1).swapaxes(0, 1)


def rotation_angles(positions, head_dim, theta, scale, factors):
    frequencies = theta ** -(np.arange(head_dim // 2) / (head_dim // 2)) / scale
    return np.arange(positions)[:, None] * (frequencies if factors is None else frequencies / factors)


def rotate(x, angles):
    """Each pair (x[i], x[i + half]) turned by its angle."""
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def attention(q, k, v):
    """Causal attention, each K/V head serving a run of query heads: [positions, heads * head_dim]."""
    k, v = (np.repeat(each, len(q) // len(each), axis=0) for each in (k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    scores[:, ~np.tri(q.shape[1], dtype=bool)] = -np.inf
    likely = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = likely / likely.sum(axis=-1, keepdims=True) @ v
    return out.swapaxes(0, 1).reshape(q.shape[1], -1)
