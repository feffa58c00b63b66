"""Every phase of a step against its own floor: what `millpond bench kernels` measures."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from millpond.config import EngineConfig
from millpond.core.block_pool import blocks_for_length
from millpond.core.step import SchedulerOutput
from millpond.errors import ConfigError
from millpond.kernels.isa import choose
from millpond.kernels.roofline import NUM_PROBES, MachineRates, Probes, measure_machine
from millpond.kernels.threads import thread_count
from millpond.model.floors import StepShape, Work, step_work
from millpond.runner.bandwidth import Bandwidth, PlainReads, step_bandwidth
from millpond.runner.model_runner import ModelRunner
from millpond.runner.phase_times import PhaseTimer, StepTimes


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase of one step over all layers: how long it took, how long it must take, and its share of the step.

    us is the median of the repetitions; best_us the best of them, to look at where others use the machine meanwhile.
    operations and bytes are of the least work; floor_us is 0 and bound_by "" where there is no floor.
    """

    phase: str
    rows: int
    us: float
    best_us: float
    floor_us: float
    bound_by: str
    share: float
    operations: float
    num_bytes: float

    @property
    def percent_of_floor(self) -> float:
        """100 where the phase is as fast as the machine allows, 50 where it takes twice as long."""
        return 100 * self.floor_us / self.us if self.us else 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """A whole step and its phases in order; bandwidth where memory bounds most of it."""

    shape: StepShape
    seconds: float
    phases: tuple[PhaseRow, ...]
    bandwidth: Bandwidth | None = None


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The machine's rates and every step that was measured."""

    machine: MachineRates
    steps: tuple[StepReport, ...]

    def as_json(self) -> dict[str, object]:
        """What `bench kernels --json` prints: rates in bytes and operations per second, times in microseconds."""
        return {
            "machine": {
                "isa": self.machine.isa,
                "threads": self.machine.threads,
                "read_bytes_s": {str(size): rate for size, rate in self.machine.reads.items()},
                "scattered_bytes_s": self.machine.scattered,
                "dot_operations_s": self.machine.dots,
            },
            "steps": [
                {
                    "name": step.shape.name,
                    **asdict(step.shape),
                    "us": step.seconds * 1e6,
                    "bandwidth": None if step.bandwidth is None else asdict(step.bandwidth),
                    "phases": [
                        {**asdict(row), "percent_of_floor": round(row.percent_of_floor, 1)} for row in step.phases
                    ],
                }
                for step in self.steps
            ],
        }


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Which steps to measure, and how often. decode: numbers of sequences, each at every one of the contexts;
    prefill: prompt lengths, each in one step."""

    decode: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill: tuple[int, ...]
    repetitions: int

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ConfigError(f"repetitions must be at least 1, got {self.repetitions}")
        if not self.shapes:
            raise ConfigError("there is no step to measure: name numbers of sequences and contexts, or prompt lengths")

    @property
    def shapes(self) -> list[StepShape]:
        decode = [StepShape(sequences, 1, context) for context in self.contexts for sequences in self.decode]
        return decode + [StepShape(1, length, length) for length in self.prefill]

    @property
    def num_measurements(self) -> int:
        return NUM_PROBES + 1 + len(self.shapes)

    def config(self, *, block_size: int = 16, **settings: Any) -> EngineConfig:
        """The settings of a runner that can take every step of the plan, and others of an EngineConfig."""
        slots = max(each.sequences for each in self.shapes)
        return EngineConfig(
            **settings,
            block_size=block_size,
            max_num_seqs=slots,
            max_num_batched_tokens=max(slots, *(each.rows for each in self.shapes)),
            max_model_len=max(each.context for each in self.shapes),
            num_blocks=max(each.sequences * blocks_for_length(each.context, block_size) for each in self.shapes),
        )


def measure_kernels(
    build: Callable[[EngineConfig], ModelRunner], config: EngineConfig, plan: KernelPlan, notify: Callable[[str], None]
) -> KernelReport:
    """Probe the machine, then time every step of the plan on the runner that `build` makes of plan.config(...).

    notify is called with the name of each of the plan's num_measurements before it starts.
    """
    assert config.num_blocks is not None
    isa, threads = choose(config.isa), thread_count(config.threads)
    rates = measure_machine(isa, threads, notify)
    notify("loading the model")
    runner = build(config)
    if runner.config.num_experts:
        raise ConfigError("the phases of a mixture of experts cannot be measured: what they read depends on the tokens")
    timer = PhaseTimer(runner, config.num_blocks, config.block_size)
    reads = PlainReads(Probes(isa, threads), runner._packed.room)
    steps = []
    for shape in plan.shapes:
        notify(shape.name)
        work = step_work(runner.config, runner._packed, shape, timer.kv_position_bytes, timer.kv_dot, isa)
        step = timer.running(shape)
        report = step_report(shape, timer.measure(step, plan.repetitions), work, rates)
        if is_bound_by_memory(report):
            num_bytes = sum(each.memory_bytes for each in work.values())
            found = step_bandwidth(partial(seconds_of, timer, step), reads.rate, num_bytes, plan.repetitions)
            report = replace(report, bandwidth=found)
        steps.append(report)
    return KernelReport(rates, tuple(steps))


def seconds_of(timer: PhaseTimer, step: SchedulerOutput) -> float:
    return timer.once(step).seconds


def is_bound_by_memory(step: StepReport) -> bool:
    """Whether phases that are bound by memory are more than half of the step's floor."""
    by_memory = sum(row.floor_us for row in step.phases if row.bound_by == "memory")
    return 2 * by_memory > sum(row.floor_us for row in step.phases)


def step_report(shape: StepShape, times: StepTimes, work: dict[str, Work], rates: MachineRates) -> StepReport:
    """What was measured beside what must be done; both name the same parts, or it raises KeyError."""
    step_bytes = sum(each.memory_bytes for each in work.values())
    rows = []
    for name, seconds in times.parts.items():
        each = work[name]
        least, bound = each.floor(rates, step_bytes)
        rows.append(
            PhaseRow(
                phase=name,
                rows=each.rows,
                us=seconds * 1e6,
                best_us=times.best[name] * 1e6,
                floor_us=least * 1e6,
                bound_by=bound if least else "",
                share=seconds / times.seconds,
                operations=sum(each.operations.values()),
                num_bytes=each.memory_bytes + each.cache_bytes,
            )
        )
    return StepReport(shape, times.seconds, tuple(rows))
