"""Qwen 3: Llama with a norm of each head's queries and keys."""

from __future__ import annotations

from millpond.model.architecture import NO_BIAS, SILU, Architecture, Block
from millpond.model.qwen2 import figures

ARCHITECTURE = Architecture(
    title="Qwen 3",
    gguf="qwen3",
    hugging_face="qwen3",
    block=Block(query_key_norm="each head"),
    figures=figures,
    only={**SILU, **NO_BIAS},
)
