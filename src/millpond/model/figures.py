"""Reads a model's figures from a GGUF's metadata or from a config.json, by the description of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millpond.errors import ModelFileError
from millpond.load.metadata import require_str
from millpond.model.architecture import Architecture
from millpond.model.architectures import ARCHITECTURES, BY_GGUF, BY_HUGGING_FACE
from millpond.model.config import ModelConfig
from millpond.model.fields import Fields
from millpond.model.rope import read_rope


def figures_of_gguf(
    metadata: Mapping[str, Any], vocab_size: int, divisors: Mapping[str, tuple[float, ...]] | None = None
) -> ModelConfig:
    """Read a GGUF's metadata. divisors: longrope's, "short" and "long", which are tensors there.

    Raises ModelFileError for what is missing, absurd or not supported.
    """
    name = _known(require_str(metadata, "general.architecture"), BY_GGUF, "architecture")
    architecture = ARCHITECTURES[name]
    fields = Fields(metadata, architecture.gguf)
    config = _read(name, architecture, fields, vocab_size, divisors)
    _only(fields, "attention.value_length", config.head_dim, "the head_dim")
    _only(fields, "rope.dimension_count", config.turned_dims, "the head_dim")
    if not architecture.block.experts and fields.integer("expert_count", 0):
        raise ModelFileError(f"a mixture of experts is not supported in architecture {name}")
    return config


def figures_of_config(config: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """Read a config.json without nulls. Raises ModelFileError for what is missing, absurd or not supported."""
    name = architecture_of_config(config)
    architecture, fields = ARCHITECTURES[name], Fields(config, None)
    for key, supported in architecture.only.items():
        fields.only(key, *supported)
    return _read(name, architecture, fields, vocab_size)


def architecture_of_config(config: Mapping[str, Any]) -> str:
    """Our name of a config.json's architecture. Raises ModelFileError for one that is not supported."""
    return _known(require_str(config, "model_type"), BY_HUGGING_FACE, "model_type")


def _known(name: str, names: Mapping[str, str], what: str) -> str:
    if name not in names:
        raise ModelFileError(f"{what} {name!r} is not supported; supported: {', '.join(names)}")
    return names[name]


def _read(
    name: str,
    architecture: Architecture,
    fields: Fields,
    vocab_size: int,
    divisors: Mapping[str, tuple[float, ...]] | None = None,
) -> ModelConfig:
    heads = fields.integer("num_heads", low=1, high=1024)
    hidden = fields.integer("hidden_size", low=32, high=1 << 20)
    experts = architecture.block.experts
    config = ModelConfig(
        architecture=name,
        num_layers=fields.integer("num_layers", low=1, high=1024),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.integer("num_kv_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        ffn_size=fields.integer("expert_ffn_size" if experts else "ffn_size", low=32, high=1 << 22),
        vocab_size=vocab_size,
        context_length=fields.integer("context_length", low=1, high=1 << 24),
        norm_epsilon=fields.number("layer_norm_epsilon" if architecture.block.encoder else "norm_epsilon", above=0.0),
        block=architecture.block,
        interleaved=architecture.interleaved and fields.is_gguf,
    )
    changes = architecture.figures(fields, config)
    if "ropes" not in changes:
        changes["ropes"] = (replace(read_rope(fields), **(divisors or {})),)
    for each in ("windows", "rope_of"):  # nothing to say is said in one way
        if not any(changes.get(each, ())):
            changes.pop(each, None)
    config = replace(config, **changes)
    config = replace(config, context_length=_context_length(config, fields))
    config.check()
    return config


def _context_length(config: ModelConfig, fields: Fields) -> int:
    """How long a text may be: a config.json does not count what a scaling of the positions makes of it."""
    rope = config.ropes[0]
    if fields.is_gguf or rope.scaling not in ("linear", "dynamic", "yarn"):
        return config.context_length
    before = rope.original_length if rope.scaling == "yarn" else config.context_length
    return max(config.context_length, int(before * rope.factor))


def _only(fields: Fields, name: str, expected: int, what: str) -> None:
    found = fields.integer(name, expected)
    if found != expected:
        raise ModelFileError(f"{fields.key(name)} is {found}; only {expected}, {what}, is supported")
