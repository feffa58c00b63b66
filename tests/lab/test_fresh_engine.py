from __future__ import annotations

from dataclasses import replace

import pytest

from millpond.core.request import SamplingParams
from millpond.core.reserve import AutoReserve
from millpond.lab.asking import Ask, drive
from millpond.lab.fresh_engine import engine_over
from tiny_engine import ids, make_engine

ASKS = {"a": Ask(ids("hello hello"), SamplingParams(max_tokens=5))}


class Counted:
    def __init__(self, inner):
        self.inner = inner
        self.num_steps = 0

    def execute(self, output):
        self.num_steps += 1
        return self.inner.execute(output)


def test_an_engine_over_another_has_its_runner_and_a_scheduler_of_its_own():
    base = make_engine(watermark_blocks=2)
    fresh = engine_over(base, wrap=Counted, num_blocks=9, max_num_seqs=2)
    assert drive(fresh, ASKS) == drive(base, ASKS)
    assert fresh.runner.inner is base.runner
    assert fresh.runner.num_steps == 5
    assert fresh.scheduler.counters.iterations == base.scheduler.counters.iterations == 6
    scheduler = fresh.scheduler
    assert (scheduler.pool.num_blocks, scheduler.max_num_seqs, scheduler.watermark_blocks) == (9, 2, 0)
    assert (fresh.config.num_blocks, fresh.config.prefix_cache, scheduler.cache) == (9, False, None)


def test_each_has_a_prefix_cache_of_its_own():
    base = make_engine()
    for _ in range(2):
        fresh = engine_over(base, prefix_cache=True)
        drive(fresh, ASKS)
        assert fresh.scheduler.counters.hit_tokens == 0
        drive(fresh, ASKS)
        assert fresh.scheduler.counters.hit_tokens == 8


def over(settings, **sizes):
    """The engine over one whose config says this besides."""
    base = make_engine()
    base.config = replace(base.config, **settings)
    return engine_over(base, **sizes)


def test_it_has_no_reserve_unless_told_and_then_the_one_that_the_config_says():
    assert over({"watermark": 0.5}).scheduler.reserve.blocks == 0
    assert over({"watermark": 0.5, "watermark_blocks": None}, watermark_blocks=None).scheduler.reserve.blocks == 32
    auto = over({"watermark": "auto"}, watermark_blocks=None, num_blocks=9).scheduler.reserve
    assert (type(auto), auto.num_blocks) == (AutoReserve, 9)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_it_leaves_the_folder_of_the_others_prefixes_alone(tmp_path, prefix_cache):
    fresh = over({"prefix_dir": tmp_path}, prefix_cache=prefix_cache)
    assert (fresh.config.prefix_dir, fresh.scheduler.disk) == (None, None)
