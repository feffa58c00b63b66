"""BERT in numpy and float64, slow and obvious: the hidden states of one whole text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import erf

import numpy as np

from tiny_bert import EPSILON, HEADS, LAYERS


def layer_norm(x, weight, bias):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON) * weight + bias


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def hidden_states(arrays: Mapping[str, np.ndarray], token_ids: Sequence[int]) -> np.ndarray:
    """Float64 [tokens, hidden]; arrays by Hugging Face's names."""
    wide = {name: values.astype(np.float64) for name, values in arrays.items()}

    def linear(x, name):
        return x @ wide[f"{name}.weight"].T + wide[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, wide[f"{name}.LayerNorm.weight"], wide[f"{name}.LayerNorm.bias"])

    def heads(x):
        return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)

    x = wide["embeddings.word_embeddings.weight"][list(token_ids)]
    x = x + wide["embeddings.position_embeddings.weight"][: len(x)] + wide["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        q, k, v = (heads(linear(x, f"{layer}.attention.self.{part}")) for part in ("query", "key", "value"))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        likely = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = (likely / likely.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1).reshape(x.shape)
        x = norm(x + linear(attended, f"{layer}.attention.output.dense"), f"{layer}.attention.output")
        ffn = linear(gelu(linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        x = norm(x + ffn, f"{layer}.output")
    return x


def embedding(arrays: Mapping[str, np.ndarray], token_ids: Sequence[int], pooling: str) -> np.ndarray:
    hidden = hidden_states(arrays, token_ids)
    vector = {"mean": hidden.mean(axis=0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return vector / np.linalg.norm(vector)
