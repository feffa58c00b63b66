"""SmolLM3: Llama where every fourth layer does not turn its queries and keys."""

from __future__ import annotations

from typing import Any

from millpond.model.architecture import NO_BIAS, SILU, Architecture
from millpond.model.config import NO_ROPE, ModelConfig
from millpond.model.fields import Fields

EVERY = 4  # a GGUF does not say


def figures(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    every = EVERY if fields.is_gguf else fields.integer("no_rope_layer_interval", EVERY, low=1)
    turns = fields.value("no_rope_layers")  # 1 where there is a rotation
    if turns is None:
        turns = [int((i + 1) % every != 0) for i in range(config.num_layers)]
    if not isinstance(turns, list) or len(turns) != config.num_layers or any(each not in (0, 1) for each in turns):
        raise fields.error("no_rope_layers", turns, f"a list of {config.num_layers}, each 0 or 1")
    return {"rope_of": tuple(0 if each else NO_ROPE for each in turns)}


ARCHITECTURE = Architecture(
    title="SmolLM3",
    gguf="smollm3",
    hugging_face="smollm3",
    figures=figures,
    only={**SILU, **NO_BIAS, "use_sliding_window": (False,)},
    interleaved=True,
)
