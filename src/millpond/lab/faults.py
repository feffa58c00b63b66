"""Schedulers with one rule broken each, to see that the proof would notice."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.core.block_pool import blocks_for_length
from millpond.core.request import Request, RequestState
from millpond.core.scheduler import Scheduler


class WithoutWaiver(Scheduler):
    def _reserve(self, need: int) -> int:
        return self.watermark_blocks


class GrowthUnderWatermark(Scheduler):
    def _grow(self) -> tuple[str, ...]:
        held_back = self.pool.allocate(min(self.watermark_blocks, self.pool.num_free)) or []
        preempted = super()._grow()
        self.pool.release(held_back)
        return preempted


class OldestAsVictim(Scheduler):
    def _preempt(self, victim: Request) -> str:
        return super()._preempt(self.running[0])


class BlocksReleasedTwice(Scheduler):
    def _give_back(self, request: Request) -> None:
        block_ids = list(request.block_ids)
        super()._give_back(request)
        self.pool.release(block_ids)


class AdmissionForNextChunk(Scheduler):
    def _blocks_needed(self, request: Request) -> int:
        chunk = request.num_tokens
        if request.state is RequestState.WAITING and self.max_num_batched_tokens is not None:
            chunk = min(chunk, self.max_num_batched_tokens)
        return blocks_for_length(chunk, self.block_size)


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A scheduler that breaks one rule. admissible_prompts offers only prompts that the reserve alone would let in."""

    name: str
    text: str
    kind: type[Scheduler]
    admissible_prompts: bool = False

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "text": self.text}


FAULTS = (
    PlantedFault("no-waiver", "the watermark is never waived", WithoutWaiver),
    PlantedFault("no-waiver-wall", "the same, for who grows past the reserve and is preempted", WithoutWaiver, True),
    PlantedFault("growth-under-watermark", "growth leaves the reserve alone", GrowthUnderWatermark),
    PlantedFault("oldest-as-victim", "the victim is the oldest", OldestAsVictim),
    PlantedFault("released-twice", "blocks are released twice", BlocksReleasedTwice),
    PlantedFault("next-chunk-only", "admission buys blocks for the next chunk alone", AdmissionForNextChunk),
)
