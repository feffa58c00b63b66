from __future__ import annotations

import pytest

from millpond.core.request import FinishReason
from millpond.engine.outputs import RequestOutput
from millpond.lab.latency import Latencies, Slo, distribution


def output(name, count=1, reason=None):
    return RequestOutput(name, (7,) * count, "", reason, 1, 1)


@pytest.fixture
def latencies():
    """a waits 2 s for its first token and 1 and 3 s for the others; b comes at 1 s and gets one token at 6 s."""
    found = Latencies()
    found.arrive("a", 0.0)
    found.arrive("b", 1.0)
    found.take([output("a")], 2.0)
    found.take([output("a")], 3.0)
    found.take([output("a", 1, FinishReason.LENGTH), output("b", 1, FinishReason.LENGTH)], 6.0)
    return found


def test_ttft_counts_from_the_arrival_and_itl_from_token_to_token(latencies):
    assert [each.ttft for each in latencies.requests.values()] == [2.0, 5.0]
    assert [each.end_to_end for each in latencies.requests.values()] == [6.0, 5.0]
    assert list(latencies.itls) == [1.0, 3.0]
    assert latencies.num_finished == 2


def test_throughput_is_all_tokens_over_the_time_to_the_last_one(latencies):
    assert (latencies.seconds, latencies.num_output_tokens, latencies.output_tok_s) == (6.0, 4, 4 / 6)


def test_tokens_that_come_together_have_no_time_between():
    found = Latencies()
    found.arrive("a", 0.0)
    found.take([output("a", 3)], 1.0)
    found.take([output("a", 2, FinishReason.STOP)], 3.0)
    assert sorted(found.itls) == [0.0, 0.0, 0.0, 2.0]
    assert found.requests["a"].mean_itl == 0.5


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(2.0, 2.0), ["a"]),
        (Slo(1.9, 2.0), []),
        (Slo(2.0, 1.9), []),
        (Slo(5.0, None), ["a", "b"]),
        (Slo(None, 0.1), ["b"]),  # an output of one token has no token to wait for
    ],
)
def test_goodput_counts_the_requests_that_met_both_bounds(latencies, slo, good):
    tokens = sum({"a": 3, "b": 1}[name] for name in good)
    assert latencies.goodput(slo) == (len(good) / 2, len(good) / 6, tokens / 6)


def test_a_distribution_has_its_mean_percentiles_and_most():
    found = distribution([float(value) for value in range(101)])
    assert found == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert distribution([]) == {}
