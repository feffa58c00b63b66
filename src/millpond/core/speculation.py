"""Speculative decoding: which guesses a step tries, and when guessing does not pay.

A step costs about as much as its rows and FIXED_ROWS more. A draft is one more row, and pays while the chance
that it is right exceeds the tokens that the step gives for a row anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millpond.core.block_pool import BlockPool, blocks_for_length
from millpond.core.ngram import RUN_LENGTHS, NgramIndex
from millpond.core.request import Request

FIXED_ROWS = 3  # as measured, between 3 and 5; the low end tries fewer guesses
MEMORY = 8  # how many guesses a chance remembers
PROBE_EVERY = 32  # where nothing pays, one step in so many has a guess, to find out whether that has changed

# What a run of 4, 3 or 2 tokens is worth before anything was tried: two thirds, a half, a third.
FIRST_CHANCES = {length: length / (2 + max(RUN_LENGTHS)) for length in RUN_LENGTHS}


@dataclass(slots=True)
class StepLoad:
    """What a step gives and costs so far: the tokens that can be expected of it, and the rows that sample them."""

    tokens: float
    rows: int

    def take(self, chance: float, most: int) -> int:
        """Add drafts that follow one another, each right with this chance, while they pay; returns how many."""
        taken, all_right = 0, chance
        while taken < most and all_right * (FIXED_ROWS + self.rows) > self.tokens:
            self.tokens += all_right
            self.rows += 1
            taken += 1
            all_right *= chance
        return taken


class Drafter(Protocol):
    """Guesses tokens for the scheduler, and is told which were right."""

    def draft(self, request: Request, most: int, load: StepLoad) -> tuple[int, ...]:
        """Up to `most` tokens, at least one, that may come after the request's present ones; they are added to load."""

    def learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Of the request's last drafts the first num_accepted were right."""

    def forget(self, request_id: str) -> None:
        """The request has ended."""


@dataclass(slots=True)
class _Record:
    """One request: its tokens; by length of run, the chance that the next token is the one that came before.

    run_length is that of the last draft, drafted_at the number of output tokens then.
    """

    index: NgramIndex = field(default_factory=NgramIndex)
    chances: dict[int, float] = field(default_factory=FIRST_CHANCES.copy)
    run_length: int = 0
    drafted_at: int = 0


class PromptLookup:
    """Drafts of up to max_tokens tokens from the request's own prompt and output."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._records: dict[str, _Record] = {}

    def draft(self, request: Request, most: int, load: StepLoad) -> tuple[int, ...]:
        record = self._records.setdefault(request.request_id, _Record())
        record.index.extend(request.token_ids_between(len(record.index), request.num_tokens))
        found = record.index.find()
        if found is None:
            return ()
        record.run_length, start = found
        count = load.take(record.chances[record.run_length], min(most, self.max_tokens))
        if count == 0 and request.num_output_tokens - record.drafted_at >= PROBE_EVERY * load.rows:
            count = 1
        if count:
            record.drafted_at = request.num_output_tokens
        return record.index.continuation(start, count)

    def learn(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        record = self._records[request.request_id]
        chance = record.chances[record.run_length]
        for _ in range(num_accepted):
            chance += (1 - chance) / MEMORY
        if num_accepted < num_drafted:
            chance -= chance / MEMORY
        record.chances[record.run_length] = chance

    def forget(self, request_id: str) -> None:
        self._records.pop(request_id, None)


def place_drafts(
    drafter: Drafter, sampling: Sequence[Request], left: int | None, pool: BlockPool, block_size: int
) -> int:
    """Guess on for those who sample in this step, in order, within the budget that is left, the free blocks, and what
    each may still generate. Returns how many guesses there are."""
    load, num_drafts = StepLoad(len(sampling), len(sampling)), 0
    for request in sampling:
        room = (len(request.block_ids) + pool.num_free) * block_size - request.num_tokens
        most = min(room, request.max_tokens - request.num_output_tokens - 1)
        most = most if left is None else min(most, left - num_drafts)
        drafts = drafter.draft(request, most, load) if most > 0 else ()
        need = blocks_for_length(request.num_tokens + len(drafts), block_size)
        request.block_ids += pool.allocate(need - len(request.block_ids), request.block_ids[-1]) or ()
        request.draft_token_ids = drafts
        num_drafts += len(drafts)
    return num_drafts
