"""A model's figures under our names, whichever file they are in: a GGUF's metadata or a config.json.

An error names the key as the file spells it, the value, and what is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond.errors import ModelFileError, shown
from millpond.load.metadata import optional_float, optional_int, optional_str, require_float, require_int

# Ours, a GGUF's behind the name of the architecture, and config.json's.
KEYS = {
    "num_layers": ("block_count", "num_hidden_layers"),
    "hidden_size": ("embedding_length", "hidden_size"),
    "num_heads": ("attention.head_count", "num_attention_heads"),
    "num_kv_heads": ("attention.head_count_kv", "num_key_value_heads"),
    "head_dim": ("attention.key_length", "head_dim"),
    "ffn_size": ("feed_forward_length", "intermediate_size"),
    "context_length": ("context_length", "max_position_embeddings"),
    "norm_epsilon": ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    "layer_norm_epsilon": ("attention.layer_norm_epsilon", "layer_norm_eps"),
    "window": ("attention.sliding_window", "sliding_window"),
    "score_cap": ("attn_logit_softcapping", "attn_logit_softcapping"),
    "logit_cap": ("final_logit_softcapping", "final_logit_softcapping"),
    "embedding_scale": ("embedding_scale", "embedding_multiplier"),
    "residual_scale": ("residual_scale", "residual_multiplier"),
    "attention_scale": ("attention.scale", "attention_multiplier"),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "num_experts": ("expert_count", "num_experts"),
    "experts_used": ("expert_used_count", "num_experts_per_tok"),
    "expert_ffn_size": ("expert_feed_forward_length", "moe_intermediate_size"),
}


@dataclass(frozen=True, slots=True)
class Fields:
    """metadata as the file has it; prefix: the architecture's name in a GGUF's keys, None for a config.json."""

    metadata: Mapping[str, Any]
    prefix: str | None

    @property
    def is_gguf(self) -> bool:
        return self.prefix is not None

    def key(self, name: str) -> str:
        """The file's key for one of our names, or for a name that is the file's own already."""
        gguf, plain = KEYS.get(name, (name, name))
        return f"{self.prefix}.{gguf}" if self.is_gguf else plain

    def has(self, name: str) -> bool:
        return self.key(name) in self.metadata

    def integer(self, name: str, default: int | None = None, *, low: int | None = None, high: int | None = None) -> int:
        """The integer; without a default it must be there."""
        if default is None:
            return require_int(self.metadata, self.key(name), low=low, high=high)
        return optional_int(self.metadata, self.key(name), default, low=low, high=high)

    def number(self, name: str, default: float | None = None, *, above: float | None = None) -> float:
        """The number; without a default it must be there."""
        if default is None:
            return require_float(self.metadata, self.key(name), above=above)
        return optional_float(self.metadata, self.key(name), default, above=above)

    def text(self, name: str) -> str | None:
        return optional_str(self.metadata, self.key(name))

    def value(self, name: str, default: Any = None) -> Any:
        """As the file has it, of any kind."""
        return self.metadata.get(self.key(name), default)

    def flag(self, name: str, default: bool) -> bool:
        """True or False."""
        found = self.value(name, default)
        if type(found) is not bool:
            raise self.error(name, found, "true or false")
        return found

    def only(self, name: str, *supported: Any) -> None:
        """Refuse any other value; what is not there is as the first."""
        found = self.value(name, supported[0])
        if found not in supported:
            raise self.error(name, found, " or ".join(map(repr, supported)))

    def error(self, name: str, found: Any, supported: str) -> ModelFileError:
        return ModelFileError(f"{self.key(name)!r} is {shown(found)}, which is not supported; supported: {supported}")
