"""The real engine and scheduler with no model: a runner that only lets virtual time pass, as a cost model says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millpond.config import EngineConfig
from millpond.core.counters import SchedulerCounters
from millpond.core.door import Door
from millpond.core.step import SampledTokens, SchedulerOutput, StepResult
from millpond.engine.engine import Engine
from millpond.engine.scheduling import make_scheduler
from millpond.errors import ConfigError
from millpond.lab.cost_model import CostModel
from millpond.lab.driving import VirtualClock, drive
from millpond.lab.latency import Latencies
from millpond.lab.pool_timeline import PoolTimeline
from millpond.lab.step_record import StepShape
from millpond.lab.stepping import NO_LIMIT
from millpond.lab.workload import WorkloadRequest, check_door
from millpond.text.tokenizer import Tokenizer

# A vocabulary of one letter, which is all that a simulated model says.
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a"],
    "tokenizer.ggml.token_type": [1],
    "tokenizer.ggml.merges": [],
}
TOKEN = (0,)


class SimulatedRunner:
    """A Runner that gives each request the same token over and over and takes its time on a virtual clock."""

    def __init__(self, cost: CostModel, clock: VirtualClock) -> None:
        self.cost = cost
        self.clock = clock

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.clock.now += self.cost.seconds(StepShape.of(output))
        return StepResult(tuple([SampledTokens(each.request_id, TOKEN) for each in output.scheduled if each.samples]))


@dataclass(slots=True)
class Simulation:
    """What became of a workload: when its tokens came, what the scheduler counted, the pool over time."""

    latencies: Latencies
    counters: SchedulerCounters
    pool: PoolTimeline
    num_blocks: int


def simulated_engine(config: EngineConfig, cost: CostModel, clock: VirtualClock) -> Engine:
    """An engine whose time is the clock's. max_model_len None is no limit but the pool; num_blocks must be given.

    Without a prefix cache, whatever the config says: a simulated prompt is a length, and no text to find again.
    """
    sized = replace(
        config, max_model_len=door_of(config).max_model_len, prefix_cache=False, prefix_dir=None, prefix_dir_size=None
    )
    return Engine(
        config=config,
        scheduler=make_scheduler(sized),
        runner=SimulatedRunner(cost, clock),
        tokenizer=Tokenizer.from_gguf(VOCABULARY),
        model_name="simulated",
        vocab_size=NO_LIMIT,
        clock=clock,
    )


def door_of(config: EngineConfig) -> Door:
    """What a simulated engine lets in. Raises ConfigError where the pool has no size."""
    if config.num_blocks is None:
        raise ConfigError("a simulation has no memory to size its pool by: num_blocks must be given")
    return Door(config.num_blocks, config.block_size, config.max_model_len or NO_LIMIT)


def simulate(
    workload: Sequence[WorkloadRequest],
    config: EngineConfig,
    cost: CostModel,
    notify: Callable[[int], None] = lambda num_finished: None,
) -> Simulation:
    """Run a workload, in order of arrival, on a simulated engine. The same arguments give the same result, to the bit.

    notify is told now and then how many requests have finished. Raises ConfigError for settings that cannot work, or
    could never serve one of the requests.
    """
    check_door(workload, door_of(config))
    clock = VirtualClock()
    engine = simulated_engine(config, cost, clock)
    pool = PoolTimeline()
    engine.observer = lambda stats: pool.add(stats, clock.now)
    latencies = drive(engine, workload, clock, notify)
    return Simulation(latencies, engine.scheduler.counters, pool, engine.scheduler.pool.num_blocks)
