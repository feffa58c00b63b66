"""The six-block wall: why a reserve that would exclude a request is waived, as four moments of a run.

6 blocks of 4 tokens, reserve 3. b is preempted with 13 tokens, which take 4 blocks, and beside the reserve there are
never more than 3: without the waiver it waits for ever, though the pool is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.block_pool import blocks_for_length
from millpond.core.request import Request
from millpond.core.scheduler import Scheduler
from millpond.core.step import SchedulerOutput
from millpond.lab.stepping import ChecksumRunner, StepLoop

NUM_BLOCKS = 6
BLOCK_SIZE = 4
RESERVE = 3
MOST_STEPS = 40  # twice what the run takes


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool after one step was scheduled: who holds each block (None: it is free), and what just happened."""

    step: int
    holders: tuple[str | None, ...]
    event: str
    stuck: bool = False


def wall_moments(scheduler_class: type[Scheduler] = Scheduler) -> tuple[Moment, ...]:
    """b is admitted, grows, is preempted, and comes back or does not: the run's moments, from the scheduler itself."""
    scheduler = scheduler_class(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=2,
        max_num_batched_tokens=None,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        watermark_blocks=RESERVE,
    )
    for token, (name, max_tokens) in enumerate((("a", 16), ("b", 12))):
        scheduler.add_request(Request(name, (token,) * 4, max_tokens))
    loop, b = StepLoop(scheduler, ChecksumRunner()), scheduler.requests["b"]
    moments: list[Moment] = []
    while scheduler.has_work and len(moments) < 4 and scheduler.counters.iterations < MOST_STEPS:
        tokens, held_before = b.num_tokens, len(b.block_ids)
        before = _holders(scheduler)
        output, _ = loop.step()
        if "b" in output.preempted:
            moments.append(Moment(output.step - 1, before, f"b has grown to {held_before},\nand the pool is full"))
        if event := _event(scheduler, b, output, tokens):
            stuck = "a" in output.released and "b" not in output.admitted
            moments.append(Moment(output.step, _holders(scheduler), event, stuck))
    return tuple(moments)


def _event(scheduler: Scheduler, b: Request, output: SchedulerOutput, tokens: int) -> str:
    need = blocks_for_length(tokens, BLOCK_SIZE)
    if "b" in output.preempted:
        return f"a grows, b is preempted:\nit keeps its {tokens} tokens"
    if "b" in output.admitted and not b.num_preemptions:
        return f"a and b are admitted,\nb holding {len(b.block_ids)} block"
    if "a" not in output.released:
        return ""
    if "b" in output.admitted:
        return f"a is done, b needs {need}:\nthe reserve is waived, b runs"
    left = scheduler.pool.num_free - scheduler.watermark_blocks
    return f"a is done, b needs {need}, the reserve\nleaves {left}: b waits for ever"


def _holders(scheduler: Scheduler) -> tuple[str | None, ...]:
    holder = {block: request.request_id for request in scheduler.requests.values() for block in request.block_ids}
    return tuple(holder.get(block) for block in range(scheduler.pool.num_blocks))
