from __future__ import annotations

from random import Random

import pytest

from millpond.core.step import StepStats
from millpond.lab.pool_timeline import MOST_SPANS, PoolTimeline, Span


def stats(seconds, *, used=0, running=0, waiting=0, preempted=0):
    return StepStats(0, 1, 1, 1, running, waiting, 100 - used, 100, preempted, 0.0, seconds, 0.0, 0.0)


def test_means_are_weighted_by_time_and_idle_time_counts_as_nothing():
    pool = PoolTimeline(width=4.0)
    pool.add(stats(1.0, used=40, running=4, waiting=8, preempted=1), 1.0)
    pool.add(stats(2.0, used=10, running=1), 4.0)  # from 2 to 4: nothing ran from 1 to 2
    assert pool.spans() == [Span(0.0, (40 + 20) / 4, (4 + 2) / 4, 8 / 4, 1)]
    assert (pool.mean_used_blocks, pool.most_used_blocks, pool.most_running, pool.most_waiting) == (15.0, 40, 4, 8)


def test_a_step_across_spans_counts_in_each_for_as_long_as_it_was_there():
    pool = PoolTimeline(width=1.0)
    pool.add(stats(2.0, used=10), 2.5)
    assert [span.used_blocks for span in pool.spans()] == [5.0, 10.0, 10.0]  # the last one is half as long


def test_spans_stay_few_and_lose_nothing_however_long_the_run():
    pool, random, now, block_seconds = PoolTimeline(), Random(0), 0.0, 0.0
    for _ in range(5000):
        seconds, used = random.random(), random.randint(0, 100)
        now += seconds + random.choice((0.0, 3.0))
        pool.add(stats(seconds, used=used, preempted=1), now)
        block_seconds += seconds * used
    spans = pool.spans()
    assert MOST_SPANS / 2 <= len(spans) <= MOST_SPANS
    assert sum(span.num_preempted for span in spans) == 5000
    assert pool.mean_used_blocks * now == pytest.approx(block_seconds)
    lengths = [pool.width] * (len(spans) - 1) + [now - spans[-1].start]
    found = sum(span.used_blocks * length for span, length in zip(spans, lengths, strict=True))
    assert found == pytest.approx(block_seconds)
