"""Workloads that were written down: the JSONL trace of a server's requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from millpond.core.policies import MOST_PRIORITY
from millpond.errors import ConfigError
from millpond.lab.jsonl import name, number, read_objects, whole_number
from millpond.lab.lengths import LONGEST
from millpond.lab.workload import MOST_SECONDS, WorkloadRequest, check_size

REMEDY = 'a trace (--trace) has a line {"arrival": seconds, "prompt_tokens": n, "output_tokens": n} for each request'


def read_trace(path: Path) -> tuple[WorkloadRequest, ...]:
    """The requests of a file with a line {"arrival": seconds, "prompt_tokens": n, "output_tokens": n} for each.

    In order of arrival, counted from the first one's; "priority" and "tenant" may be there too, and may be null, and
    other keys are left alone. A prompt repeats one token, the number of its line among the requests. Raises ConfigError
    naming the line.
    """
    requests: list[WorkloadRequest] = []
    num_tokens = 0
    for place, fields in read_objects(path, REMEDY):
        arrival = number(fields, "arrival", place, 0.0)
        prompt = whole_number(fields, "prompt_tokens", place, 1, LONGEST)
        output = whole_number(fields, "output_tokens", place, 1, LONGEST)
        num_tokens += prompt + output
        check_size(len(requests) + 1, num_tokens)
        priority = 0
        if fields.get("priority") is not None:
            priority = whole_number(fields, "priority", place, -MOST_PRIORITY, MOST_PRIORITY)
        tenant = name(fields, "tenant", place)
        requests.append(WorkloadRequest(arrival, (len(requests) + 1,) * prompt, output, priority, tenant))
    requests.sort(key=lambda request: request.arrival)
    return _from_the_first(requests, path)


def _from_the_first(requests: list[WorkloadRequest], path: Path) -> tuple[WorkloadRequest, ...]:
    """Arrivals may be the time of day; what counts is when each comes after the first."""
    first, last = requests[0].arrival, requests[-1].arrival
    if last - first > MOST_SECONDS:
        raise ConfigError(
            f"{path}: the last request comes {last - first:g} seconds after the first, more than {MOST_SECONDS:g}; "
            f"arrivals are in seconds"
        )
    return tuple(replace(each, arrival=each.arrival - first) for each in requests)
