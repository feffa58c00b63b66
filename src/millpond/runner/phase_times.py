"""How long each phase of a step takes as it runs: by all threads, in its place between the others, over all layers."""

import time
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from millpond.core.block_pool import blocks_for_length
from millpond.core.sampling import SamplingParams
from millpond.core.step import Admission, ScheduledRequest, SchedulerOutput
from millpond.kernels.attention import BLOCK
from millpond.kernels.threads import phases_walked, time_phases
from millpond.model.arrays import kv_block_bytes
from millpond.model.floors import AFTER, BEFORE, StepShape, phase_names
from millpond.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
FILL = 0x3C  # a byte that makes a small number of every type that K/V and its scales are kept in
KV_DOTS = {np.float32: "float32", np.uint16: "bf16", np.uint8: "u8 x s8"}  # what K/V of a type is multiplied by


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a whole step, and of its parts by name, which add up to it (but for medians); best: of each part's
    best repetition."""

    seconds: float
    parts: dict[str, float]
    best: dict[str, float]


class PhaseTimer:
    """Times steps of one runner, whose K/V it fills first: memory that was never written to is not read as memory is.

    Sequences hold blocks from all over the pool, as after a while of serving.
    """

    def __init__(self, runner: ModelRunner, num_blocks: int, block_size: int) -> None:
        self._runner, self._rng = runner, np.random.default_rng(0)
        self._num_blocks, self._block_size = num_blocks, block_size
        self._names = [BEFORE, *phase_names(runner.config.num_layers), AFTER]
        for part in runner._cache:
            part[:, runner._places[:num_blocks]] = np.full(part.itemsize, FILL, np.uint8).view(part.dtype)[0]
        self.kv_position_bytes = kv_block_bytes(runner.config, runner._kv_dtype) / BLOCK
        self.kv_dot = KV_DOTS[runner._kv_dtype]

    def step(self, shape: StepShape) -> SchedulerOutput:
        """A step of random tokens. Raises ValueError where the pool has too few blocks for it."""
        each = blocks_for_length(shape.context, self._block_size)
        if shape.sequences * each > self._num_blocks:
            raise ValueError(f"{shape.name} takes {shape.sequences * each} blocks, the pool has {self._num_blocks}")
        blocks = self._rng.permutation(self._num_blocks).tolist()
        vocab = self._runner.sampler.vocab_size
        scheduled = []
        for slot in range(shape.sequences):
            tokens = tuple(self._rng.integers(0, vocab, shape.new_tokens).tolist())
            own = tuple(blocks[slot * each : (slot + 1) * each])
            scheduled.append(
                ScheduledRequest(
                    request_id=f"timed-{slot}",
                    slot=slot,
                    first_position=shape.context - shape.new_tokens,
                    token_ids=tokens,
                    block_ids=own,
                    samples=True,
                    output_position=1,
                    admission=Admission(tokens, (), GREEDY, 0),
                )
            )
        return SchedulerOutput(0, tuple(scheduled))

    def once(self, step: SchedulerOutput) -> StepTimes:
        """Run a step and read its clocks."""
        sync, readings = self._runner._scratch.sync, np.zeros((len(self._names) - 1, 2), np.int64)
        time_phases(sync, readings)
        start = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._runner.execute(step)
        end = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        time_phases(sync, None)
        assert phases_walked(sync) == len(readings) - 1, "the walk's phases are those of floors.py"
        moments = np.array([start, *(readings[:, 0] * 1_000_000_000 + readings[:, 1]), end])
        parts = dict.fromkeys(self._names, 0.0)
        for name, nanoseconds in zip(self._names, np.diff(moments).tolist(), strict=True):
            parts[name] += nanoseconds / 1e9
        return StepTimes((end - start) / 1e9, parts, parts)

    def running(self, shape: StepShape) -> SchedulerOutput:
        """A step of this shape that can be repeated: it has been run once, and admits nobody any more."""
        step = self.step(shape)
        self.once(step)
        return replace(step, scheduled=tuple(each._replace(admission=None) for each in step.scheduled))

    def measure(self, step: SchedulerOutput, repetitions: int) -> StepTimes:
        """The median of each part and of the whole over the repetitions."""
        times = [self.once(step) for _ in range(repetitions)]
        parts = {name: median(each.parts[name] for each in times) for name in times[0].parts}
        best = {name: min(each.parts[name] for each in times) for name in parts}
        return StepTimes(median(each.seconds for each in times), parts, best)
