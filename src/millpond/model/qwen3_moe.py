"""Qwen 3, mixtures of experts: Qwen 3 with a choice among FFNs in every layer."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import NO_BIAS, SILU, Architecture, Block
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields

MOST = 4096  # experts that are worth a look at


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """That the shares of the chosen experts are made to add up to 1 a GGUF does not say: in this kind they are."""
    if not fields.is_gguf and not fields.has("num_experts"):  # a newer spelling
        count = fields.integer("num_local_experts", low=1, high=MOST)
    else:
        count = fields.integer("num_experts", low=1, high=MOST)
    return {
        "num_experts": count,
        "experts_used": fields.integer("experts_used", low=1, high=count),
        "normalise_experts": fields.is_gguf or fields.flag("norm_topk_prob", False),
    }


ARCHITECTURE = Architecture(
    title="Qwen 3, mixtures of experts",
    gguf="qwen3moe",
    hugging_face="qwen3_moe",
    block=Block(query_key_norm="each head", experts=True),
    figures=figures,
    only={
        **SILU,
        **NO_BIAS,
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "use_sliding_window": (False,),
    },
    layer_names={"ffn_gate_inp": "mlp.gate"},
)
