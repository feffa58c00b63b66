"""BERT: every token sees the whole text; LayerNorms of sums, positions from a table, a GELU FFN without a gate."""

from __future__ import annotations

from typing import Any

from millpond.load.metadata import optional_int
from millpond.model.architecture import Architecture, Block
from millpond.model.config import NO_ROPE, ModelConfig
from millpond.model.fields import Fields
from millpond.model.rope import Rope

TYPE_COUNT = "tokenizer.ggml.token_type_count"


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    if fields.is_gguf:
        fields.only("attention.causal", False)
    count = optional_int(fields.metadata, TYPE_COUNT if fields.is_gguf else "type_vocab_size", 2, low=1)
    return {"ropes": (Rope(),), "rope_of": (NO_ROPE,) * config.num_layers, "token_types": count}


ARCHITECTURE = Architecture(
    title="BERT (all-MiniLM, bge, e5, gte)",
    gguf="bert",
    hugging_face="bert",
    block=Block(norms="sums", qkv_bias=True, activation="exact gelu", encoder=True),
    figures=figures,
    only={
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    whole_names={
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
    },
    layer_names={
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    outer="bert.",
    layers="encoder.layer",
    idle=("embeddings.position_ids", "pooler.", "cls."),
)
