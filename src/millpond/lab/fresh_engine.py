"""Engines over the runner of another: a scheduler and a prefix cache of their own, and no weights to load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from millpond.core.disk_prefixes import DiskPrefixes
from millpond.core.policies import make_policy
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import Drafter
from millpond.core.step import Runner
from millpond.engine.engine import Engine


def engine_over(
    base: Engine,
    *,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    scheduler_type: Callable[..., Scheduler] = Scheduler,
    drafter: Drafter | None = None,
    prefix_cache: bool = False,
    disk: DiskPrefixes | None = None,
    **sizes: Any,
) -> Engine:
    """A fresh engine with a scheduler of its own over the base's runner, its sizes at most the base's, with no reserve
    unless told.

    With a drafter, no more rows than the base's runner has room for may sample in a step. They share the runner's K/V,
    so only one of them may have work at a time, and one with a prefix cache is of no more use once another has worked.
    """
    config = dataclasses.replace(base.config, **{"watermark_blocks": 0, "prefix_cache": prefix_cache, **sizes})
    scheduler = scheduler_type(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        watermark_blocks=config.watermark_blocks,
        drafter=drafter,
        prefix_cache=prefix_cache,
        disk=disk,
        policy=make_policy(config.policy, dict(config.tenant_weights)),
    )
    return Engine(
        config=config,
        scheduler=scheduler,
        runner=wrap(base.runner),
        tokenizer=base.tokenizer,
        model_name=base.model_name,
        vocab_size=base.limits.vocab_size,
        embedding_size=base.limits.embedding_size,
    )
