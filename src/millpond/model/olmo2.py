"""OLMo 2: norms of what attention and the FFN give, not of what they take, and of all queries and all keys at once."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import NO_BIAS, SILU, Architecture, Block
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """OLMo 3's files call themselves olmo2, too."""
    if fields.has("window"):
        raise fields.error("window", fields.value("window"), "models without a window (OLMo 2)")
    return {}


ARCHITECTURE = Architecture(
    title="OLMo 2",
    gguf="olmo2",
    hugging_face="olmo2",
    block=Block(norms="after", query_key_norm="all heads"),
    figures=figures,
    only={**SILU, **NO_BIAS},
    layer_names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
