from __future__ import annotations

import pytest

from engine_helpers import drive
from millpond.core.request import FinishReason, SamplingParams
from millpond.core.speculation import PromptLookup
from millpond.engine.metrics import EngineMetrics, Histogram
from tiny_engine import IM_END, ids, make_engine


class Ticking:
    """A clock that moves on by `step` seconds at each reading."""

    def __init__(self, step=0.0):
        self.now, self.step = 100.0, step

    def __call__(self):
        self.now += self.step
        return self.now


def measured(clock=None, **settings):
    """A tiny engine with metrics and a clock; every record of a request's end is in engine.ended."""
    engine = make_engine(**settings)
    engine.ended = []
    engine.metrics = EngineMetrics(engine.scheduler, engine.ended.append)
    engine._clock = clock or Ticking()
    return engine


def ask(engine, request_id, prompt="hi", max_tokens=4, arrived=None, **sampling):
    sampling = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **sampling})
    engine.add_request(request_id, ids(prompt), sampling, arrived)


def step_at(engine, *moments):
    """One step at each of the moments."""
    for moment in moments:
        engine._clock.now = moment
        engine.step()


def test_a_value_on_a_bound_is_in_the_bucket_that_ends_there():
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    histogram.observe(3.0, times=2)
    assert histogram.counts == [2, 2, 3]
    assert histogram.total == 13.5


def test_a_request_waits_prefills_and_decodes_in_the_times_that_its_steps_took():
    engine = measured(max_num_seqs=1, max_num_batched_tokens=4)
    ask(engine, "a", prompt="12345678", max_tokens=3, arrived=90.0)
    step_at(engine, 101.0, 104.0, 110.0, 130.0)
    [times] = engine.ended
    assert (times.arrived, times.admitted, times.first_token, times.last_token) == (90.0, 101.0, 104.0, 130.0)
    assert (times.num_prompt_tokens, times.num_output_tokens, times.finish_reason) == (8, 3, FinishReason.LENGTH)
    metrics = engine.metrics
    expected = {
        "queue_time": 11.0,
        "prefill_time": 3.0,
        "time_to_first_token": 14.0,
        "decode_time": 26.0,
        "e2e_latency": 40.0,
        "time_per_output_token": 13.0,
        "request_prompt_tokens": 8,
        "request_generation_tokens": 3,
    }
    assert {name: (sum(each.counts), each.total) for name in expected if (each := getattr(metrics, name))} == {
        name: (1, total) for name, total in expected.items()
    }
    assert (sum(metrics.inter_token_latency.counts), metrics.inter_token_latency.total) == (2, 26.0)


def test_tokens_are_counted_once_each_whatever_the_chunks():
    for budget in (4, 64):
        engine = measured(max_num_batched_tokens=budget)
        for number in range(5):
            ask(engine, str(number), prompt="12345678", max_tokens=number + 1)
        drive(engine)
        assert (engine.metrics.prompt_tokens, engine.metrics.generation_tokens) == (40, 15)


def test_the_tokens_of_a_preempted_request_are_counted_once_and_its_queue_time_ends_at_its_first_admission():
    engine = measured(Ticking(0.001), num_blocks=8, max_num_seqs=3, prefix_cache=False)
    for number in range(8):
        ask(engine, str(number), prompt="123456", max_tokens=10)
    drive(engine)
    counters, metrics = engine.scheduler.counters, engine.metrics
    assert counters.preemptions == 4
    assert counters.recomputed_tokens == 36
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (48, 80)
    assert sum(metrics.queue_time.counts) == sum(metrics.e2e_latency.counts) == 8
    # Every token but the first of each request comes some time after another.
    assert sum(metrics.inter_token_latency.counts) == 72
    for times in engine.ended:
        assert times.arrived < times.admitted < times.first_token < times.last_token == times.ended


def test_each_way_to_end_is_counted_by_its_name_and_only_good_ones_have_latencies(caplog):
    engine = measured(script={"stop": [*ids("ab"), IM_END]}, raises={3: RuntimeError("boom")})
    ask(engine, "stop", ignore_eos=False)
    ask(engine, "length", max_tokens=2)
    ask(engine, "abort")
    engine.step()
    engine.abort("abort")
    engine.abort("abort")
    engine.abort("unknown")
    drive(engine)
    ask(engine, "error")
    drive(engine)
    assert engine.metrics.finished == {
        FinishReason.STOP: 1,
        FinishReason.LENGTH: 1,
        FinishReason.ABORT: 1,
        FinishReason.ERROR: 1,
    }
    assert sum(engine.metrics.e2e_latency.counts) == 2
    assert engine.metrics._requests == {}
    by_id = {times.request_id: times for times in engine.ended}
    assert by_id["abort"].num_output_tokens == 1
    assert by_id["error"].first_token is None
    assert "1 requests end with an error: error" in caplog.text


def test_what_is_aborted_before_it_ran_was_never_admitted():
    engine = measured(max_num_seqs=1)
    ask(engine, "runs")
    ask(engine, "waits")
    engine.step()
    engine.abort_all()
    assert [(times.request_id, times.admitted is None) for times in engine.ended] == [("runs", False), ("waits", True)]


def test_a_step_is_the_sum_of_its_phases():
    engine = measured(Ticking(1.0))
    ask(engine, "a", max_tokens=2)
    engine.step()
    engine.step()
    phases = engine.metrics.phase_seconds
    # The scripted runner does not say what its parts took.
    assert phases == {"schedule": 2.0, "arrays": 0.0, "forward": 0.0, "sample": 0.0, "update": 4.0}
    assert engine.metrics.step_seconds.total == 8.0
    assert sum(engine.metrics.step_seconds.counts) == engine.metrics.num_steps == 2
    assert engine.metrics.step_tokens.total == 3


@pytest.mark.parametrize("audit", [False, True])
def test_an_audit_is_counted_for_every_step_that_has_one(audit):
    engine = measured(audit=audit)
    ask(engine, "a", max_tokens=3)
    drive(engine)
    assert engine.metrics.num_steps > 0
    assert engine.metrics.num_audits == (engine.metrics.num_steps if audit else 0)


def test_a_guess_that_is_right_is_a_token_and_no_latency_of_its_own():
    script = [*ids("abcabcabcabc"), IM_END]
    engine = measured(script={"a": script}, drafter=PromptLookup(8))
    ask(engine, "a", prompt="abcabcabc", max_tokens=12)
    moments = [100.0 + step for step in range(12)]
    step_at(engine, *moments)
    [times] = engine.ended
    metrics, num_steps = engine.metrics, int(times.ended - 100.0) + 1
    assert metrics.generation_tokens == 12
    assert num_steps < 12, "no guess was right"
    assert sum(metrics.inter_token_latency.counts) == num_steps - 1


def test_a_request_from_before_the_metrics_is_served_and_not_counted():
    engine = make_engine()
    ask(engine, "a")
    engine.metrics = EngineMetrics(engine.scheduler)
    assert len(drive(engine)["a"]) == 4
    assert engine.metrics.generation_tokens == 0
    assert sum(engine.metrics.finished.values()) == 0


def test_a_delay_by_the_watermark_is_counted_where_the_reserve_alone_stood_in_the_way():
    delays = {}
    for reserve in (0, 2):
        engine = make_engine(num_blocks=8, max_num_seqs=8, watermark_blocks=reserve, prefix_cache=False)
        for number in range(4):
            ask(engine, str(number), prompt="123456", max_tokens=2)
        engine.step()
        delays[reserve] = (engine.scheduler.num_running, engine.scheduler.counters.watermark_delays)
    # Two blocks each: four fit the pool, and beside the reserve of two only three.
    assert delays == {0: (4, 0), 2: (3, 1)}


def test_a_pool_that_is_short_anyway_is_no_delay_by_the_watermark():
    engine = make_engine(num_blocks=8, max_num_seqs=8, watermark_blocks=1)
    ask(engine, "a", prompt="1" * 28, max_tokens=2)
    ask(engine, "b", prompt="1" * 28, max_tokens=2)
    engine.step()
    assert (engine.scheduler.num_waiting, engine.scheduler.counters.watermark_delays) == (1, 0)
