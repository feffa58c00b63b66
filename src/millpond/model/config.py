"""A model's figures, read from a checkpoint's metadata and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond.errors import ModelFileError
from millpond.load.metadata import optional_float, optional_int, optional_str, require_float, require_int, require_str

ARCHITECTURES = ("llama",)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Figures of a Llama-shaped model. vocab_size counts the embedding's rows; rope_scale divides the positions."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rope_scale: float
    norm_epsilon: float

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], vocab_size: int) -> "ModelConfig":
        """Read a GGUF's metadata. Raises ModelFileError for what is missing, absurd or not supported."""
        arch = require_str(metadata, "general.architecture")
        if arch not in ARCHITECTURES:
            raise ModelFileError(f"architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
        heads = require_int(metadata, f"{arch}.attention.head_count", low=1, high=1024)
        hidden = require_int(metadata, f"{arch}.embedding_length", low=32, high=1 << 20)
        head_dim = optional_int(metadata, f"{arch}.attention.key_length", hidden // heads)
        config = cls(
            architecture=arch,
            num_layers=require_int(metadata, f"{arch}.block_count", low=1, high=1024),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=optional_int(metadata, f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_size=require_int(metadata, f"{arch}.feed_forward_length", low=32, high=1 << 22),
            vocab_size=vocab_size,
            context_length=require_int(metadata, f"{arch}.context_length", low=1, high=1 << 24),
            rope_theta=optional_float(metadata, f"{arch}.rope.freq_base", 10000.0, above=0.0),
            rope_scale=_rope_scale(metadata, arch),
            norm_epsilon=require_float(metadata, f"{arch}.attention.layer_norm_rms_epsilon", above=0.0),
        )
        config._check(metadata)
        return config

    def _check(self, metadata: Mapping[str, Any]) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelFileError(f"{self.num_heads} heads cannot share {self.num_kv_heads} K/V heads")
        if self.head_dim < 16 or self.head_dim % 16:
            raise ModelFileError(f"head_dim must be a multiple of 16, got {self.head_dim}")
        for name in ("hidden_size", "ffn_size"):
            if getattr(self, name) % 32:
                raise ModelFileError(f"{name} must be a multiple of 32, got {getattr(self, name)}")
        if self.num_heads * self.head_dim % 32:
            raise ModelFileError(f"heads * head_dim must be a multiple of 32, got {self.num_heads * self.head_dim}")
        for key, expected in (("rope.dimension_count", self.head_dim), ("attention.value_length", self.head_dim)):
            found = optional_int(metadata, f"{self.architecture}.{key}", expected)
            if found != expected:
                raise ModelFileError(
                    f"{self.architecture}.{key} is {found}; only {expected}, the head_dim, is supported"
                )
        if optional_int(metadata, f"{self.architecture}.expert_count", 0):
            raise ModelFileError("mixtures of experts are not supported")


def _rope_scale(metadata: Mapping[str, Any], arch: str) -> float:
    kind = optional_str(metadata, f"{arch}.rope.scaling.type") or "none"
    if kind == "none":
        return optional_float(metadata, f"{arch}.rope.scale_linear", 1.0, above=0.0)
    if kind == "linear":
        return require_float(metadata, f"{arch}.rope.scaling.factor", above=0.0)
    raise ModelFileError(f"rope scaling {kind!r} is not supported; supported: none, linear")
