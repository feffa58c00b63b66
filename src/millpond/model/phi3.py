"""Phi 3 and Phi 4: Llama with q, k and v in one tensor and gate and up in another, a rotation of a part of each head,
and longrope."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import NO_BIAS, SILU, Architecture, Block, windows_of
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {
        "windows": windows_of(fields, config, lambda i: True),
        "rotary_dims": _rotary_dims(fields, config),
    }


def _rotary_dims(fields: Fields, config: ModelConfig) -> int:
    if fields.is_gguf:
        return fields.integer("rope.dimension_count", config.head_dim)
    parameters = fields.value("rope_parameters")
    inner = Fields(parameters if isinstance(parameters, dict) else {}, None)
    share = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0, above=0.0), above=0.0)
    return int(config.head_dim * share)


ARCHITECTURE = Architecture(
    title="Phi 3 and 4",
    gguf="phi3",
    hugging_face="phi3",
    block=Block(fused=True),
    figures=figures,
    only={**SILU, **NO_BIAS},
    layer_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)
