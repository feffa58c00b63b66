"""Llama 2 and 3, and all that is built like them (SmolLM, SmolLM2, TinyLlama): the layer that others differ from."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import NO_BIAS, SILU, Architecture
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    """A GGUF calls Mistral's models llama, too; one of those may name its window, which all layers have."""
    size = fields.integer("window", 0, low=0) if fields.is_gguf else 0
    return {"windows": (size,) * config.num_layers}


ARCHITECTURE = Architecture(
    title="Llama 2 and 3, SmolLM, SmolLM2",
    gguf="llama",
    hugging_face="llama",
    figures=figures,
    only={**SILU, **NO_BIAS},
    interleaved=True,
)
