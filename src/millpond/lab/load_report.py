"""A load in figures: latencies, throughput, goodput, what failed and how, and whether the client kept up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

from millpond.lab.latency import Goodput, Slo, distribution
from millpond.lab.load_client import LoadRecord
from millpond.lab.load_test import LoadRun

# A lag above this share of the median TTFT is in the figures, and so is a client that takes so much of a core.
LATE_SHARE, BUSY_SHARE = 0.05, 0.5
LEAST_LAG = 0.002  # seconds: the system wakes a sleeper up to one millisecond late


def figures(run: LoadRun, slo: Slo) -> dict[str, Any]:
    """Latencies in seconds (of requests that went well), throughput of the whole run, errors, goodput.

    Everything is counted from when a request was due; from_send_s has the same from when it left this client.
    """
    good = [each for each in run.records if each.is_ok]
    seconds = run.seconds
    outputs, prompts = tokens(good, "completion_tokens"), tokens(good, "prompt_tokens")
    return {
        "requests": len(run.records),
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "errors": errors(run.records),
        "seconds": seconds,
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "requests_s": len(good) / seconds,
        "output_tok_s": outputs["counted"] / seconds,
        "total_tok_s": (outputs["counted"] + prompts["counted"]) / seconds,
        **latencies(good),
        "goodput": None if slo == Slo() else {**slo._asdict(), **goodput(run, slo)._asdict()},
        "client": client_figures(run),
    }


def latencies(good: Sequence[LoadRecord]) -> dict[str, Any]:
    """itl is from each piece of text to the next; tpot the seconds for each token after a request's first."""
    times = [each.times for each in good]
    sent = [(each.sent, each) for each in good if each.sent is not None]
    return {
        "ttft_s": distribution([each.ttft for each in times]),
        "itl_s": distribution([gap for each in good for gap in each.gaps]),
        "tpot_s": distribution([each.mean_itl for each in times if each.num_tokens > 1]),
        "e2e_s": distribution([each.end_to_end for each in times]),
        "from_send_s": {
            "ttft": distribution([each.pieces[0] - start for start, each in sent]),
            "e2e": distribution([each.pieces[-1] - start for start, each in sent]),
        },
    }


def tokens(good: Sequence[LoadRecord], kind: str) -> dict[str, Any]:
    """How many were asked for and how many there were, by the server's usage or, where that is missing, by counting.

    Then a piece of text counts as one token of the output, and a prompt as what was asked for.
    """
    is_output = kind == "completion_tokens"
    by_usage = sum(each.usage[kind] for each in good if each.usage is not None)
    uncounted = [each for each in good if each.usage is None]
    counted_here = sum(len(each.pieces) if is_output else each.prompt_tokens for each in uncounted)
    return {
        "asked": sum(each.max_tokens if is_output else each.prompt_tokens for each in good),
        "counted": by_usage + counted_here,
        "requests_without_usage": len(uncounted),
        **({"pieces": sum(len(each.pieces) for each in good)} if is_output else {}),
    }


def goodput(run: LoadRun, slo: Slo) -> Goodput:
    """A request that failed is not a good one, but one of all."""
    good = [each for each in run.records if each.is_ok and slo.is_met(each.times)]
    num_tokens = sum(each.output_tokens for each in good)
    return Goodput(len(good) / len(run.records), len(good) / run.seconds, num_tokens / run.seconds)


def errors(records: Iterable[LoadRecord]) -> list[dict[str, Any]]:
    """Each kind with how often, what the first of them said, and what Retry-After came with it, most frequent first."""
    failed = sorted((each for each in records if not each.is_ok), key=lambda each: str(each.error))
    found = []
    for kind, group in groupby(failed, key=lambda each: each.error):
        same = list(group)
        said = sorted({each.retry_after for each in same if each.retry_after is not None}, key=_in_order)
        first = min(same, key=lambda each: each.index)
        found.append({"kind": kind, "count": len(same), "message": first.message, "retry_after": said})
    return sorted(found, key=lambda each: -int(str(each["count"])))


def _in_order(retry_after: str) -> tuple[int, str]:
    return (int(retry_after), "") if retry_after.isdecimal() else (-1, retry_after)


def client_figures(run: LoadRun) -> dict[str, Any]:
    """How much of a core this process took, how late it began requests (lag), how long connections took."""
    cpu_share = run.cpu_seconds / run.seconds
    lag = distribution([each.started - each.due for each in run.records])
    ttft = distribution([each.times.ttft for each in run.records if each.is_ok])
    return {
        "cpu_share": cpu_share,
        "lag_s": lag,
        "connect_s": distribution([each.sent - each.started for each in run.records if each.sent is not None]),
        "most_in_flight": max(number for _, number in in_flight(run.records)),
        "is_late": lag["p99"] > max(LEAST_LAG, LATE_SHARE * ttft.get("p50", 0.0)),
        "is_busy": cpu_share > BUSY_SHARE,
    }


def in_flight(records: Iterable[LoadRecord]) -> Iterator[tuple[float, int]]:
    """How many requests are under way from each moment on at which that changes, in order."""
    changes: Counter[float] = Counter()
    for each in records:
        changes[each.started] += 1
        changes[each.ended] -= 1
    moments = sorted(changes)
    return zip(moments, accumulate(changes[moment] for moment in moments), strict=True)
