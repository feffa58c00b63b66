from __future__ import annotations

import pytest

from millpond.errors import EngineError, InvalidRequestError
from millpond.lab.bench_pace import QUIET_STEPS, PaceRow, measure_pace
from tiny_engine import make_engine


class Ticking:
    """A runner whose steps take a second for each of their tokens."""

    def __init__(self, inner):
        self.inner = inner
        self.now = 0.0

    def execute(self, output):
        self.now += output.num_tokens
        return self.inner.execute(output)


def engine_with(**settings):
    sizes = {"num_blocks": 2000, "max_model_len": 2000, "max_num_seqs": 4, "max_num_batched_tokens": 64, "audit": False}
    return make_engine(wrap=Ticking, **{**sizes, **settings})


def test_steps_are_timed_in_quiet_and_until_the_long_prompt_has_its_first_token():
    engine = engine_with()
    notified = []
    row = measure_pace(engine, 3, 150, lambda: engine.runner.now, notified.append)
    assert row.quiet == (3.0,) * (2 * QUIET_STEPS)
    # The prompt has what three streams leave of 64 tokens.
    assert row.beside == (64.0, 64.0, 3.0 + 150 - 2 * 61)
    assert row.prefill_seconds == sum(row.beside)
    assert len(notified) == 3
    assert not engine.has_unfinished
    assert engine.scheduler.pool.num_free == 2000


def test_the_figures_are_milliseconds_and_the_ratio_is_that_of_the_two_p99():
    row = PaceRow(4, 100, (0.002,) * 10, (0.005, 0.005), 0.01)
    assert row.as_json() == {
        "streams": 4,
        "prompt_tokens": 100,
        "quiet_p50_ms": 2.0,
        "quiet_p99_ms": 2.0,
        "beside_p50_ms": 5.0,
        "beside_p99_ms": 5.0,
        "p99_ratio": 2.5,
        "prefill_seconds": 0.01,
    }


def test_a_stream_that_loses_its_pace_to_the_pool_is_an_error_with_the_remedy():
    engine = engine_with(num_blocks=300)
    with pytest.raises(EngineError, match="1 of 3 streams got no token in a step: give the pool more memory"):
        measure_pace(engine, 3, 150, lambda: engine.runner.now)


def test_a_prompt_that_does_not_fit_is_refused():
    engine = engine_with()
    with pytest.raises(InvalidRequestError, match="5000"):
        measure_pace(engine, 1, 5000, lambda: engine.runner.now)
