"""Gemma 2: norms on both sides of each block, capped scores and logits, a window in every other layer."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import NO_BIAS, Architecture, Block, windows_of
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields

GELU = ("gelu_pytorch_tanh",)
ONLY = {"hidden_activation": GELU, **NO_BIAS, "use_bidirectional_attention": (False,)}
NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# A GGUF does not say what scores are scaled by. Of the models there are, the largest of a kind has the width of a head
# that the hidden size would give, and the others that of a head.
LARGEST = 46


def score_scale(fields: Fields, config: ModelConfig, largest: int) -> float:
    """query_pre_attn_scalar ** -0.5. largest: how many layers the largest model of the kind has."""
    if not fields.is_gguf:
        return fields.number("query_pre_attn_scalar", 256.0, above=0.0) ** -0.5
    width = config.hidden_size // config.num_heads if config.num_layers == largest else config.head_dim
    return fields.number("attention_scale", width**-0.5, above=0.0)


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {
        "windows": windows_of(fields, config, lambda i: i % 2 == 0),
        "attention_scale": score_scale(fields, config, LARGEST),
        "embedding_scale": config.hidden_size**0.5,
        "score_cap": fields.number("score_cap", 50.0 if fields.is_gguf else 0.0),
        "logit_cap": fields.number("logit_cap", 30.0 if fields.is_gguf else 0.0),
    }


ARCHITECTURE = Architecture(
    title="Gemma 2",
    gguf="gemma2",
    hugging_face="gemma2",
    block=Block(norms="both", activation="gelu"),
    figures=figures,
    only=ONLY,
    norm_shift=1.0,
    layer_names=NAMES,
)
