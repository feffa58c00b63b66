"""An engine under a workload that comes by the clock: the same loop for a real engine and for a simulated one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from millpond.core.sampling import SamplingParams
from millpond.engine.engine import Engine
from millpond.lab.latency import Latencies
from millpond.lab.workload import WorkloadRequest

NOTIFY_EVERY = 500  # requests


class WaitingClock(Protocol):
    """A clock that can be waited on."""

    def __call__(self) -> float: ...
    def wait_until(self, moment: float) -> None: ...


class VirtualClock:
    """Seconds that pass only when somebody lets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class RealClock:
    """The clock on the wall."""

    def __call__(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.perf_counter()))


def drive(
    engine: Engine,
    workload: Sequence[WorkloadRequest],
    clock: WaitingClock,
    notify: Callable[[int], None] = lambda num_finished: None,
) -> Latencies:
    """Hand over each request once its time has come, step until all are done, and note when each token came.

    Requests enter between steps, as in the server, and nothing but max_tokens ends them. The workload is in order of
    arrival. Its priorities count where the policy knows them: one workload is to run under all policies. notify is told
    now and then how many have finished. Raises InvalidRequestError for what cannot be served.
    """
    latencies = Latencies()
    start, upcoming, told = clock(), 0, 0
    while upcoming < len(workload) or engine.has_unfinished:
        now = clock() - start
        while upcoming < len(workload) and workload[upcoming].arrival <= now:
            each = workload[upcoming]
            sampling = SamplingParams(max_tokens=each.max_tokens, temperature=0.0, ignore_eos=True)
            priority = each.priority if engine.config.policy == "priority" else 0
            engine.add_request(str(upcoming), each.prompt_token_ids, sampling, priority=priority, tenant=each.tenant)
            latencies.arrive(str(upcoming), each.arrival)
            upcoming += 1
        if not engine.has_unfinished:
            clock.wait_until(start + workload[upcoming].arrival)
            continue
        outputs = engine.step()
        latencies.take(outputs, clock() - start)
        if latencies.num_finished - told >= NOTIFY_EVERY:
            told = latencies.num_finished
            notify(told)
    return latencies
