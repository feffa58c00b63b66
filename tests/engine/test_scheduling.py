from __future__ import annotations

import pytest

from millpond.config import EngineConfig
from millpond.core.fair_shares import Fair
from millpond.core.reserve import AutoReserve
from millpond.core.scheduler import Scheduler
from millpond.core.speculation import PromptLookup
from millpond.engine.scheduling import make_scheduler
from millpond.errors import ConfigError

SIZES = {"num_blocks": 40, "block_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 50, "max_model_len": 99}


def test_a_scheduler_is_what_the_config_says():
    settings = {"policy": "fair", "tenant_weights": (("a", 2.0),), "watermark": 0.1}
    scheduler = make_scheduler(EngineConfig(**SIZES, **settings, prefix_cache=False))
    assert (scheduler.pool.num_blocks, scheduler.block_size, scheduler.max_num_seqs) == (40, 8, 3)
    assert (scheduler.max_num_batched_tokens, scheduler.door.max_model_len) == (50, 99)
    assert (type(scheduler.policy), scheduler.policy.weights, scheduler.watermark_blocks) == (Fair, {"a": 2.0}, 4)
    assert (scheduler.cache, scheduler.drafter, scheduler.disk) == (None, None, None)


def test_a_reserve_may_choose_itself():
    reserve = make_scheduler(EngineConfig(**SIZES, watermark="auto")).reserve
    assert (type(reserve), reserve.num_blocks, reserve.block_size) == (AutoReserve, 40, 8)


def test_the_guesses_and_the_type_are_the_callers_and_the_cache_is_there_by_default():
    class Kind(Scheduler):
        pass

    drafter = PromptLookup(4)
    scheduler = make_scheduler(EngineConfig(**SIZES), drafter=drafter, scheduler_type=Kind)
    assert (type(scheduler), scheduler.drafter) == (Kind, drafter)
    assert scheduler.cache is not None


@pytest.mark.parametrize("name", ["num_blocks", "max_model_len"])
def test_a_size_that_is_open_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name} is open: "):
        make_scheduler(EngineConfig(**{**SIZES, name: None}))
