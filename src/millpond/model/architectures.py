"""The architectures that run, each described in a file of its own."""

from __future__ import annotations

from millpond.model import (
    bert,
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from millpond.model.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama.ARCHITECTURE,
    "mistral": mistral.ARCHITECTURE,
    "smollm3": smollm3.ARCHITECTURE,
    "qwen2": qwen2.ARCHITECTURE,
    "qwen3": qwen3.ARCHITECTURE,
    "qwen3_moe": qwen3_moe.ARCHITECTURE,
    "gemma2": gemma2.ARCHITECTURE,
    "gemma3": gemma3.ARCHITECTURE,
    "phi3": phi3.ARCHITECTURE,
    "granite": granite.ARCHITECTURE,
    "olmo2": olmo2.ARCHITECTURE,
    "bert": bert.ARCHITECTURE,
}
BY_GGUF = {each.gguf: name for name, each in ARCHITECTURES.items() if each.gguf is not None}
BY_HUGGING_FACE = {each.hugging_face: name for name, each in ARCHITECTURES.items() if each.hugging_face is not None}
