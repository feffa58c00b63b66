"""When the tokens of a workload came: TTFT, ITL and end to end in percentiles, throughput, and goodput."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millpond.engine.outputs import RequestOutput

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class RequestTimes:
    """Seconds from the start of the workload; num_tokens counts the output."""

    arrival: float
    first: float = -1.0
    last: float = -1.0
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def mean_itl(self) -> float:
        """Seconds for each token after the first; 0 for an output of one token."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    @property
    def end_to_end(self) -> float:
        return self.last - self.arrival


class Slo(NamedTuple):
    """The most seconds that a request may wait for its first token, and for each later one on average."""

    ttft: float | None = None
    itl: float | None = None

    def is_met(self, times: RequestTimes) -> bool:
        in_time = self.ttft is None or times.ttft <= self.ttft
        return in_time and (self.itl is None or times.mean_itl <= self.itl)


class Goodput(NamedTuple):
    """Requests that met the SLO: their share, and they and their tokens for each second of the whole run."""

    share: float
    requests_s: float
    output_tok_s: float


@dataclass(slots=True)
class Latencies:
    """Filled step by step. itls holds the seconds from each token to the next of the same request."""

    requests: dict[str, RequestTimes] = field(default_factory=dict)
    itls: array[float] = field(default_factory=lambda: array("d"))
    num_finished: int = 0

    def arrive(self, request_id: str, arrival: float) -> None:
        self.requests[request_id] = RequestTimes(arrival)

    def take(self, outputs: Sequence[RequestOutput], now: float) -> None:
        """The tokens of one step, which all came now. Those that came to one request together have no time between."""
        requests, add_itl = self.requests, self.itls.append
        for output in outputs:
            count = len(output.new_token_ids)
            times = requests[output.request_id]
            if output.finish_reason is not None:
                self.num_finished += 1
            if not count:
                continue
            if times.num_tokens:
                add_itl(now - times.last)
            else:
                times.first = now
            if count > 1:
                self.itls.extend([0.0] * (count - 1))
            times.last = now
            times.num_tokens += count

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        requests = self.requests.values()
        return max(each.last for each in requests) - min(each.arrival for each in requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(each.num_tokens for each in self.requests.values())

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.seconds

    def goodput(self, slo: Slo) -> Goodput:
        good = [each for each in self.requests.values() if slo.is_met(each)]
        num_tokens = sum(each.num_tokens for each in good)
        return Goodput(len(good) / len(self.requests), len(good) / self.seconds, num_tokens / self.seconds)

    def distributions(self) -> dict[str, dict[str, float]]:
        """Seconds of ttft, itl and e2e: mean, percentiles and max."""
        requests = self.requests.values()
        return {
            "ttft": distribution([each.ttft for each in requests]),
            "itl": distribution(self.itls),
            "e2e": distribution([each.end_to_end for each in requests]),
        }


def distribution(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p95, p99 and max; nothing for no values. A percentile lies between the two nearest values."""
    if not values:
        return {}
    import numpy

    numbers = numpy.asarray(values, numpy.float64)
    found = numpy.percentile(numbers, PERCENTILES).tolist()
    percentiles = {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(numbers.mean()), **percentiles, "max": float(numbers.max())}
