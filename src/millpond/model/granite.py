"""Granite 3: Llama with factors of the embedding, the scores, what each block adds, and the logits."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import NO_BIAS, SILU, Architecture
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields

SCALES = ("embedding_scale", "residual_scale", "logit_scale")


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    # A config.json that says nothing of the scores leaves them as they are; a GGUF, as other architectures do.
    usual = config.head_dim**-0.5 if fields.is_gguf else 1.0
    scales = {name: fields.number(name, 1.0, above=0.0) for name in SCALES}
    return {**scales, "attention_scale": fields.number("attention_scale", usual, above=0.0)}


ARCHITECTURE = Architecture(
    title="Granite 3 (dense)",
    gguf="granite",
    hugging_face="granite",
    figures=figures,
    only={**SILU, **NO_BIAS},
    interleaved=True,
)
