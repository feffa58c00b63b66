from __future__ import annotations

import pytest

from disk_stand_in import MemoryDisk, disk_in
from lab.test_bench_prefix import Paced
from millpond.core.disk_prefixes import DiskPrefixes
from millpond.errors import ConfigError, EngineError
from millpond.lab.bench_restart import RestartBench
from tiny_engine import make_engine


def bench(tmp_path, **settings):
    engine = make_engine(wrap=Paced, **settings)
    return RestartBench(engine, lambda: disk_in(tmp_path)(engine.runner.inner), engine.runner.clock)


def test_the_row_has_the_times_of_a_prompt_computed_loaded_and_in_memory(tmp_path):
    (row,) = bench(tmp_path).run([18], 2, lambda name: None)
    assert (row.prompt_tokens, row.loaded_tokens) == (18, 16)
    # A step costs a second and one for each token: 18 of them, or the two behind what is not computed.
    assert (row.cold_ttft, row.loaded_ttft, row.pool_ttft, row.gain) == (19.0, 3.0, 3.0, 19 / 3)
    assert row.disk_bytes == 4 * next(tmp_path.rglob("*.kv")).stat().st_size


def test_an_answer_that_differs_ends_the_measurement():
    engine = make_engine(wrap=Paced)
    disk = MemoryDisk(engine.runner.inner)
    offer = disk.offer

    def spoil(block_id, block):
        offer(block_id, block)
        disk.blocks[block.key] = block, bytes(engine.runner.inner.block_bytes)

    disk.offer = spoil
    restart = RestartBench(engine, lambda: DiskPrefixes(disk, 4, lambda: 0.0), engine.runner.clock)
    with pytest.raises(EngineError, match="9 tokens: an answer from what was on disk differs"):
        restart.run([9], 1, lambda name: None)


def test_a_prompt_that_has_no_room_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="a prompt of 121 tokens and 8 of output have no room; 12"):
        bench(tmp_path).run([8, 121], 1, lambda name: None)
