"""Schedulers with one rule broken each, to see that the proof would notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millpond.core.block_pool import blocks_for_length
from millpond.core.prefix_cache import Prefix
from millpond.core.request import Request, RequestState
from millpond.core.scheduler import Scheduler
from millpond.core.step import BlockData


class WithoutWaiver(Scheduler):
    def _reserve(self, head: Request, need: int, taken: int) -> int:
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


class FoundBeforeComputed(Scheduler):
    def _start(self, request: Request, need: int, found: list[int], fetched: Sequence[BlockData]) -> None:
        super()._start(request, need, found, fetched)
        start = request.num_computed_tokens
        request.num_computed_tokens = request.num_tokens - 1
        self._publish(request)
        request.num_computed_tokens = start


class LastTokenFound(Scheduler):
    def _find(self, request: Request) -> Prefix:
        request.output_token_ids.append(0)
        found = super()._find(request)
        request.output_token_ids.pop()
        return found


class ParentEvictedFirst(Scheduler):
    def _give_back(self, request: Request) -> None:
        for block_id in request.block_ids:
            self.pool.release((block_id,))
        request.block_ids.clear()
        super()._give_back(request)


class NoHolderMore(Scheduler):
    def _start(self, request: Request, need: int, found: list[int], fetched: Sequence[BlockData]) -> None:
        held = [block_id for block_id in found if self.pool.ref_count(block_id)]
        super()._start(request, need, found, fetched)
        self.pool.release(held)


class FoundBeforeLoaded(Scheduler):
    def _start(self, request: Request, need: int, found: list[int], fetched: Sequence[BlockData]) -> None:
        super()._start(request, need, found, fetched)
        if fetched:
            self._publish(request)


class LoadForgotten(Scheduler):
    def _start(self, request: Request, need: int, found: list[int], fetched: Sequence[BlockData]) -> None:
        super()._start(request, need, found, fetched)
        self.loads = self.loads[:-1]


class TakesAnybodysPlace(Scheduler):
    def _admit(self, budget: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        displaced = (self._preempt(self.running[-1]),) if self.waiting and self.running else ()
        admitted, more = super()._admit(budget)
        return admitted, displaced + more


class PromptCut(Scheduler):
    def _admit(self, budget: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        door, self.door = self.door, replace(self.door, whole_prompts=False)
        admitted = super()._admit(budget)
        self.door = door
        return admitted


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A scheduler that breaks one rule. admissible_prompts offers only prompts that the reserve alone would let in.

    So many positions show it under a policy, where there are many more states than by arrival.
    """

    name: str
    text: str
    kind: type[Scheduler]
    admissible_prompts: bool = False
    prefix_cache: bool = False
    policy: str = "fcfs"
    positions: int = 2
    disk: bool = False
    whole_prompts: bool = False

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "text": self.text}


FAULTS = (
    PlantedFault("no-waiver", "the watermark is never waived", WithoutWaiver),
    PlantedFault(
        "no-waiver-wall",
        "the same, for who grows past the reserve and is preempted",
        WithoutWaiver,
        admissible_prompts=True,
        positions=4,
    ),
    PlantedFault("growth-under-watermark", "growth leaves the reserve alone", GrowthUnderWatermark),
    PlantedFault("oldest-as-victim", "the victim is the oldest", OldestAsVictim),
    PlantedFault("released-twice", "blocks are released twice", BlocksReleasedTwice),
    PlantedFault("next-chunk-only", "admission buys blocks for the next chunk alone", AdmissionForNextChunk),
)
SHARING_FAULTS = (
    PlantedFault("found-too-soon", "blocks are found before they are computed", FoundBeforeComputed, prefix_cache=True),
    PlantedFault("last-token-found", "the last token is found as well", LastTokenFound, prefix_cache=True),
    PlantedFault("parent-first", "a block is evicted before those behind it", ParentEvictedFirst, prefix_cache=True),
    PlantedFault(
        "no-holder-more", "a block that is found has no holder more", NoHolderMore, prefix_cache=True, positions=3
    ),
)
DISK_FAULTS = (
    PlantedFault(
        "found-before-loaded", "what is on its way from disk is found", FoundBeforeLoaded, prefix_cache=True, disk=True
    ),
    PlantedFault("load-forgotten", "a block counts that was not loaded", LoadForgotten, prefix_cache=True, disk=True),
)
ORDERING_FAULTS = (
    PlantedFault("anybodys-place", "a head takes the place of one that goes before it", TakesAnybodysPlace),
)


WHOLE_FAULTS = (
    PlantedFault("prompt-cut", "a prompt starts where a step has one token left", PromptCut, whole_prompts=True),
    replace(FAULTS[0], whole_prompts=True),
)


def planted_in(
    policy: str, prefix_cache: bool, disk: bool = False, whole_prompts: bool = False
) -> tuple[PlantedFault, ...]:
    """The faults that a proof of a policy, with the prefix cache and a disk or without, or of whole prompts, should
    see."""
    if whole_prompts:
        return tuple(replace(fault, policy=policy, positions=3) for fault in WHOLE_FAULTS)
    faults = (*SHARING_FAULTS, *(DISK_FAULTS if disk else ())) if prefix_cache else FAULTS
    if policy == "fcfs":
        return faults
    return tuple(replace(fault, prefix_cache=prefix_cache, policy=policy) for fault in (*faults, *ORDERING_FAULTS))
