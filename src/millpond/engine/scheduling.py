"""The scheduler that a config describes: the one place where its sizes, policy and reserve are put together."""

from __future__ import annotations

from collections.abc import Callable

from millpond.config import EngineConfig
from millpond.core.disk_prefixes import PrefixDisk
from millpond.core.policies import make_policy
from millpond.core.reserve import make_reserve
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import Drafter
from millpond.errors import ConfigError


def make_scheduler(
    config: EngineConfig,
    *,
    drafter: Drafter | None = None,
    disk: PrefixDisk | None = None,
    whole_prompts: bool = False,
    scheduler_type: Callable[..., Scheduler] = Scheduler,
) -> Scheduler:
    """What guesses and what is on disk are the caller's to say, as not every runner can do it, and whether prompts are
    to be whole in a step.

    Raises ConfigError where num_blocks or max_model_len are open still, and for a reserve that the pool cannot hold.
    """
    for name in ("num_blocks", "max_model_len"):
        if getattr(config, name) is None:
            raise ConfigError(f"{name} is open: a scheduler needs to know it, so give it or have it filled in")
    assert config.num_blocks is not None
    return scheduler_type(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        whole_prompts=whole_prompts,
        reserve=make_reserve(config.num_blocks, config.block_size, config.watermark, config.watermark_blocks),
        drafter=drafter,
        prefix_cache=config.prefix_cache,
        policy=make_policy(config.policy, dict(config.tenant_weights)),
        disk=disk,
    )
