"""A load against a server, by the clock or in a closed loop, from this process and one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from millpond.lab.load_client import LoadClient, LoadRecord, LoadRequest
from millpond.lab.load_dialect import Dialect
from millpond.lab.load_plan import LoadPlan
from millpond.lab.workload import WorkloadRequest, check_size


def write_requests(workload: Sequence[WorkloadRequest], dialect: Dialect, plan: LoadPlan) -> tuple[LoadRequest, ...]:
    """The requests of a workload as they go over the wire, with prompts drawn anew: only the prefixes are shared.

    Written before the load begins, so that it costs nothing while others are measured. Raises ConfigError for more
    tokens than a workload may have.
    """
    num_tokens = sum(len(each.prompt_token_ids) + each.max_tokens for each in workload)
    check_size(len(workload), num_tokens + max(len(workload), plan.prefix_groups) * plan.shared_prefix)
    random = Random(plan.seed)
    num_units = dialect.units(plan.shared_prefix, is_start=False) if plan.shared_prefix else 0
    prefixes = [dialect.draw(num_units, random) for _ in range(plan.prefix_groups)]
    requests = []
    for each in workload:
        own_tokens = len(each.prompt_token_ids)
        units = random.choice(prefixes) + dialect.draw(dialect.units(own_tokens), random)
        body = dialect.body(units, each.max_tokens)
        requests.append(LoadRequest(each.arrival, plan.shared_prefix + own_tokens, each.max_tokens, body))
    return tuple(requests)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A record for each request, in their order, and the processor seconds that this process took meanwhile."""

    records: tuple[LoadRecord, ...]
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """From when the first was due to when the last was over."""
        return max(each.ended for each in self.records) - min(each.due for each in self.records)


async def run_load(
    client: LoadClient,
    requests: Sequence[LoadRequest],
    *,
    concurrency: int | None = None,
    notify: Callable[[int], None] = lambda num_over: None,
    cpu_clock: Callable[[], float] = time.process_time,
) -> LoadRun:
    """Send each request when it is due; with a concurrency, so many at a time, the next when one is over.

    notify is told how many are over. Nothing that the server does raises: it is in the records.
    """
    loop = asyncio.get_running_loop()
    origin, started_cpu = loop.time(), cpu_clock()
    records: dict[int, LoadRecord] = {}

    async def one(index: int, due: float) -> None:
        records[index] = await client.send(index, requests[index], due, origin)
        notify(len(records))

    async def one_after_another() -> None:
        for index in upcoming:
            await one(index, loop.time() - origin)

    upcoming = iter(range(len(requests)))
    async with asyncio.TaskGroup() as group:
        if concurrency is None:
            for index in upcoming:
                await asyncio.sleep(max(0.0, origin + requests[index].due - loop.time()))
                group.create_task(one(index, requests[index].due))
        else:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(one_after_another())
    return LoadRun(tuple(records[index] for index in range(len(requests))), cpu_clock() - started_cpu)
