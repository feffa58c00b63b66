"""Gemma 3, text: Gemma 2 with a norm of each head's queries and keys, and two rotations: five layers look back over a
window and turn by one, every sixth looks at everything and turns by another."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import Architecture, Block, windows_of
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields
from millpond.model.gemma2 import NAMES, ONLY, score_scale
from millpond.model.rope import Rope, read_parameters, read_rope

EVERY = 6
LARGEST = 62
THETAS = GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    pattern = fields.value("attention.sliding_window_pattern" if fields.is_gguf else "sliding_window_pattern", EVERY)
    if isinstance(pattern, list) and len(pattern) == config.num_layers:  # True where there is a window
        slides = [bool(each) for each in pattern]
    elif type(pattern) is int and pattern > 0:
        slides = [(i + 1) % pattern != 0 for i in range(config.num_layers)]
    else:
        raise fields.error("sliding_window_pattern", pattern, f"a number above 0, or a list of {config.num_layers}")
    windows = windows_of(fields, config, lambda i: slides[i])
    ropes = _ropes(fields)
    return {
        "windows": windows,
        "ropes": ropes,
        "rope_of": tuple(1 if window else 0 for window in windows),
        "attention_scale": score_scale(fields, config, LARGEST),
        "embedding_scale": config.hidden_size**0.5,
        "score_cap": fields.number("score_cap", 0.0),
        "logit_cap": fields.number("logit_cap", 0.0),
    }


def _ropes(fields: Fields) -> tuple[Rope, Rope]:
    """Of the layers that look at everything, and of those with a window, which nothing scales."""
    given = fields.value("rope_parameters")
    if isinstance(given, dict) and "full_attention" in given:
        both = (given.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
        wide, near = (read_parameters(each, fields, theta) for each, theta in zip(both, THETAS, strict=True))
        return wide, near
    key = "rope.freq_base_swa" if fields.is_gguf else "rope_local_base_freq"
    return read_rope(fields, GLOBAL_THETA), Rope(fields.number(key, LOCAL_THETA, above=0.0))


ARCHITECTURE = Architecture(
    title="Gemma 3 (text)",
    gguf="gemma3",
    hugging_face="gemma3_text",
    block=Block(norms="both", activation="gelu", query_key_norm="each head"),
    figures=figures,
    only=ONLY,
    norm_shift=1.0,
    layer_names=NAMES,
)
