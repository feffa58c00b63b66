"""Mistral: Llama where every layer may look back over a window only."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import SILU, Architecture, windows_of
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {"windows": windows_of(fields, config, lambda i: True)}


ARCHITECTURE = Architecture(
    title="Mistral",
    gguf=None,  # its files call themselves llama
    hugging_face="mistral",
    figures=figures,
    only={**SILU},
)
