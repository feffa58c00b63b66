"""What the scheduler itself costs in a step, by how many requests run and how many wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from millpond.core.block_pool import blocks_for_length
from millpond.core.request import Request
from millpond.core.scheduler import Scheduler
from millpond.core.step import Clock, SampledTokens, SchedulerOutput, StepResult
from millpond.errors import ConfigError

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
TOKEN = 1


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """Decode steps of num_running requests while num_waiting wait: median seconds of schedule(), update() and both."""

    num_running: int
    num_waiting: int
    schedule: float
    update: float
    step: float

    def as_json(self) -> dict[str, float]:
        seconds = {"schedule": self.schedule, "update": self.update, "step": self.step}
        microseconds = {f"{name}_microseconds": round(1e6 * value, 1) for name, value in seconds.items()}
        return {"running": self.num_running, "waiting": self.num_waiting, **microseconds}


def measure_scheduler(num_running: int, num_waiting: int, num_steps: int, clock: Clock) -> SchedulerRow:
    """num_steps decode steps with no model, after the prefill and a step that are not counted."""
    scheduler = _crowded(num_running, num_waiting, num_steps + 2)
    for _ in range(2):
        scheduler.update(_result(scheduler.schedule()))
    times = []
    for _ in range(num_steps):
        started = clock()
        output = scheduler.schedule()
        scheduled = clock()
        result = _result(output)
        executed = clock()
        scheduler.update(result)
        times.append((scheduled - started, clock() - executed))
    schedule, update = zip(*times, strict=True)
    return SchedulerRow(num_running, num_waiting, median(schedule), median(update), median(map(sum, times)))


def measure_all(
    running: tuple[int, ...], waiting: tuple[int, ...], num_steps: int, clock: Clock, notify: Callable[[str], None]
) -> list[SchedulerRow]:
    """Every number of running requests with every number of waiting ones. Raises ConfigError where there is none."""
    if not running or not waiting:
        raise ConfigError("--running and --waiting must each name at least one number")
    rows = []
    for num_running in running:
        for num_waiting in waiting:
            notify(f"{num_running} running, {num_waiting} waiting")
            rows.append(measure_scheduler(num_running, num_waiting, num_steps, clock))
    return rows


def _crowded(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """A scheduler whose slots and pool are just enough for num_running requests that go on for num_steps."""
    scheduler = Scheduler(
        num_blocks=num_running * blocks_for_length(PROMPT_TOKENS + num_steps, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=None,
        max_model_len=PROMPT_TOKENS + num_steps + 1,
    )
    prompt = (TOKEN,) * PROMPT_TOKENS
    for index in range(num_running + num_waiting):
        scheduler.add_request(Request(f"r{index}", prompt, num_steps + 1))
    return scheduler


def _result(output: SchedulerOutput) -> StepResult:
    return StepResult(tuple(SampledTokens(each.request_id, (TOKEN,)) for each in output.scheduled))
