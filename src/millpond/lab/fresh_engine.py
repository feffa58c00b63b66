"""Engines over the runner of another: a scheduler and a prefix cache of their own, and no weights to load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from millpond.core.disk_prefixes import PrefixDisk
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import Drafter
from millpond.core.step import Runner
from millpond.engine.engine import Engine
from millpond.engine.scheduling import make_scheduler


def engine_over(
    base: Engine,
    *,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    scheduler_type: Callable[..., Scheduler] = Scheduler,
    drafter: Drafter | None = None,
    prefix_cache: bool = False,
    disk: PrefixDisk | None = None,
    **sizes: Any,
) -> Engine:
    """A fresh engine with a scheduler of its own over the base's runner, its sizes at most the base's, with no reserve
    unless told, and with no disk but the one that is given: the folder of the base's prefixes is its alone.

    With a drafter, no more rows than the base's runner has room for may sample in a step. They share the runner's K/V,
    so only one of them may have work at a time, and one with a prefix cache is of no more use once another has worked.
    """
    settings = {"watermark_blocks": 0, "prefix_cache": prefix_cache, "prefix_dir": None, "prefix_dir_size": None}
    config = dataclasses.replace(base.config, **{**settings, **sizes})
    return Engine(
        config=config,
        scheduler=make_scheduler(
            config,
            drafter=drafter,
            disk=disk,
            whole_prompts=base.scheduler.door.whole_prompts,
            scheduler_type=scheduler_type,
        ),
        runner=wrap(base.runner),
        tokenizer=base.tokenizer,
        model_name=base.model_name,
        vocab_size=base.limits.vocab_size,
        embedding_size=base.limits.embedding_size,
    )
