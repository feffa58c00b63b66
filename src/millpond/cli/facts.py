"""What `millpond doctor` says, gathered from the functions that the engine itself decides by."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from millpond.cli.options import format_memory
from millpond.cli.settings import Settings
from millpond.config import EngineConfig

if TYPE_CHECKING:
    from millpond.model.checkpoint import ModelFile
    from millpond.model.config import ModelConfig
    from millpond.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Fact:
    """One line: its name in JSON, its value there, and how a person reads it."""

    name: str
    value: object
    text: str


def fact(name: str, value: object, text: str | None = None) -> Fact:
    return Fact(name, value, str(value) if text is None else text)


def memory_fact(name: str, num_bytes: int) -> Fact:
    return Fact(name, num_bytes, format_memory(num_bytes))


def processor_facts(config: EngineConfig) -> list[Fact]:
    """The processor, the features that the kernels ask for, and which kernels they give."""
    from millpond.kernels.isa import FEATURES, ISAS, choose, detect, runnable

    cpu = detect()
    kernels, can_run = choose(config.isa, cpu), runnable(cpu)
    better = next((isa for isa in reversed(ISAS) if isa not in can_run), None)
    lacks = f"{better} needs {', '.join(cpu.missing(better))}" if better else "it has all they need"
    why = "asked for" if config.isa != "auto" else lacks
    needed = {flag: flag in cpu.flags for flag in FEATURES}
    return [
        fact("name", cpu.name),
        fact("architecture", cpu.architecture),
        fact("features", needed, ", ".join(f"{flag} {'yes' if there else 'no'}" for flag, there in needed.items())),
        fact("kernels", kernels, f"{kernels} ({why}; it can run {', '.join(can_run)})"),
    ]


def thread_facts(config: EngineConfig) -> list[Fact]:
    """How many threads compute, and what decided it."""
    from millpond.kernels.threads import thread_count
    from millpond.machine import cgroup_quota

    host = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    quota = cgroup_quota()
    threads = thread_count(config.threads)
    limit = "none" if quota is None else f"{quota:g} cores"
    why = "asked for" if config.threads is not None else f"affinity {affinity} of {host} cores, cgroup quota {limit}"
    return [
        fact("threads", threads, f"{threads} ({why})"),
        fact("host_cores", host),
        fact("affinity_cores", affinity),
        fact("cgroup_quota_cores", quota, limit),
    ]


def model_facts(file: ModelFile, figures: ModelConfig) -> list[Fact]:
    """The figures of a model file."""
    from millpond.build import find_pooling, name_of, read_tokenizer

    tokenizer, pooling = read_tokenizer(file), find_pooling(file, figures, lambda line: None)
    kinds = Counter(tensor.kind for tensor in file.tensors.values())
    num_parameters = sum(prod(tensor.shape) for tensor in file.tensors.values())
    return [
        fact("name", file.metadata.get("general.name", name_of(file.path))),
        fact("file", str(file.path)),
        memory_fact("size_bytes", sum(path.stat().st_size for path in file.paths)),
        fact("architecture", figures.architecture),
        fact("layers", figures.num_layers),
        fact("hidden_size", figures.hidden_size),
        fact("heads", figures.num_heads),
        fact("kv_heads", figures.num_kv_heads),
        fact("head_dim", figures.head_dim),
        fact("ffn_size", figures.ffn_size),
        fact("context_length", figures.context_length, f"{figures.context_length} tokens"),
        fact("tensor_types", dict(kinds), ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())),
        fact("parameters", num_parameters, f"{num_parameters / 1e6:.1f} million"),
        fact("vocab_size", tokenizer.vocab_size, f"{tokenizer.vocab_size} tokens"),
        fact("tokenizer", tokenizer.source.kind),
        fact("ends", sorted(tokenizer.eos_token_ids), end_tokens(tokenizer)),
        fact("chat_template", tokenizer.chat_template is not None, "yes" if tokenizer.chat_template else "none"),
        fact("embeddings", pooling, "none" if pooling is None else f"of length {figures.hidden_size}, by {pooling}"),
        fact("licence", str(file.metadata.get("general.license", "not named in the file"))),
    ]


def end_tokens(tokenizer: Tokenizer) -> str:
    """The tokens that end an answer."""
    named = [tokenizer.vocabulary.tokens[token_id] for token_id in sorted(tokenizer.eos_token_ids)]
    return ", ".join(named) or "none: an answer ends by its length alone"


def pool_facts(figures: ModelConfig, config: EngineConfig, available: int) -> list[Fact]:
    """The K/V pool that an engine of these settings would have, and what the watermark holds back of it."""
    from millpond.build import for_whole_prompts, plan_pool

    plan = plan_pool(figures, config, available)
    if figures.is_encoder:
        config = for_whole_prompts(config, plan.max_model_len)
    return [
        fact("type", config.kv_type),
        memory_fact("position_bytes", plan.position_bytes),
        fact("blocks", plan.num_blocks, f"{plan.num_blocks} (decided by: {plan.reason})"),
        fact("block_size", plan.block_size, f"{plan.block_size} tokens"),
        fact("tokens", plan.num_tokens),
        memory_fact("memory_bytes", plan.num_bytes),
        fact("max_model_len", plan.max_model_len, f"{plan.max_model_len} tokens"),
        fact("watermark_blocks", plan.watermark_blocks, watermark_text(plan.watermark_blocks, config)),
    ]


def watermark_text(reserve: int, config: EngineConfig) -> str:
    """The reserve, where it comes from, and why it is nothing where a share was asked for."""
    if config.watermark_blocks is not None:
        return f"{reserve} blocks held back from newcomers (asked for)"
    if isinstance(config.watermark, str):
        return "chosen as requests run, as much as they are likely to need (auto)"
    share = f"{config.watermark:g} of the pool"
    if reserve == 0 and config.watermark > 0:
        return f"0 blocks: {share} is less than one block; --watermark-blocks sets it in blocks"
    return f"{reserve} blocks held back from newcomers ({share})"


def gather(model: str, config: EngineConfig, settings: Settings) -> dict[str, list[Fact]]:
    """Every section of the report. A model that is not on this machine is said to be so, not fetched."""
    from millpond.kernels.cache import folder_in_use
    from millpond.load.store import find
    from millpond.machine import available_memory
    from millpond.model.checkpoint import open_checkpoint

    available = available_memory()
    report = {
        "processor": processor_facts(config),
        "threads": thread_facts(config),
        "memory": [memory_fact("available_bytes", available)],
        "kernel_cache": [fact("folder", str(folder_in_use()))],
    }
    path = find(model, cache_dir=settings.cache_folder)
    if path is None:
        report["model"] = [
            fact("name", model),
            fact("file", None, f"not here yet; fetch it with: millpond pull {model}"),
        ]
        return report
    file, figures = open_checkpoint(path)
    return {**report, "pool": pool_facts(figures, config, available), "model": model_facts(file, figures)}
