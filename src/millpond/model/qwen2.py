"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and a window in the upper layers on request."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import SILU, Architecture, Block, windows_of
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields

UPPER = 28  # max_window_layers where the file does not say


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    if fields.is_gguf or not fields.flag("use_sliding_window", False):
        return {}
    upper = fields.integer("max_window_layers", UPPER, low=0)
    return {"windows": windows_of(fields, config, lambda i: i >= upper)}


ARCHITECTURE = Architecture(
    title="Qwen 2 and 2.5",
    gguf="qwen2",
    hugging_face="qwen2",
    block=Block(qkv_bias=True),
    figures=figures,
    only={**SILU},
)
