"""Which sizes a scheduler can work with."""

from __future__ import annotations

from millpond.errors import ConfigError


def check_sizes(block_size: int, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int | None) -> None:
    """Raise ConfigError for a size below 1."""
    sizes = {"block_size": block_size, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    if max_num_batched_tokens is not None:
        sizes["max_num_batched_tokens"] = max_num_batched_tokens
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def check_whole_prompts(
    max_model_len: int, max_num_batched_tokens: int | None, drafts: bool, finds_prefixes: bool
) -> None:
    """Raise ConfigError where a prompt might not fit a step, or part of it be left out of one."""
    if max_num_batched_tokens is not None and max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"this model reads a prompt whole, in one step: max_num_batched_tokens, {max_num_batched_tokens}, must be "
            f"at least max_model_len, {max_model_len}; raise the one or lower the other"
        )
    if drafts or finds_prefixes:
        raise ConfigError("whole prompts leave nothing to guess and no prefix to find: turn drafts and the cache off")
