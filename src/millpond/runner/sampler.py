"""The sampler: logits to tokens, every row by its own rules and by nothing else.

A request's mask is laid over the raw logits, then come penalties, then temperature, then min_p, top_k and top_p on
what that makes likely.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.core.step import Admission, TokenScore
from millpond.kernels.link import entry_point
from millpond.kernels.matmul import COLUMNS
from millpond.kernels.reference import Referred
from millpond.runner.masks import SlotMask
from millpond.runner.sampler_kernels import (
    ALL_MASKED,
    BLOCK,
    BRACKET,
    IN_PROMPT,
    NO_DRAFT,
    NOT_FINITE,
    Rows,
    Rules,
    Scratch,
    link_sampler,
    sample_by,
)
from millpond.runner.scores import Scorer

LARGEST_VOCABULARY = 1 << 20
SEED_BITS = (1 << 64) - 1


class Sampler:
    """Chooses tokens for up to max_num_seqs slots.

    Only the first vocab_size of the logits_width columns are read, so padding is never chosen. A row's token is a
    function of its logits, its slot's rules and penalty counts, its seed and its output position: of no other row
    and of no order.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, logits_width: int) -> None:
        if not 0 < vocab_size <= min(logits_width, LARGEST_VOCABULARY):
            raise ValueError(
                f"vocab_size must be from 1 to {min(logits_width, LARGEST_VOCABULARY)} "
                f"for logits of width {logits_width}, got {vocab_size}"
            )
        self.vocab_size = vocab_size
        self.logits_width = logits_width
        self._rules, self._scratch = Referred(_new_rules(max_num_seqs, vocab_size)), Referred(_new_scratch(vocab_size))
        self._entry = link_compiled()
        self._masks: dict[int, SlotMask] = {}
        self._num_top: dict[int, int] = {}
        self._raw_rows: dict[int, NDArray[np.float32]] = {}
        self.scorer = Scorer(vocab_size)

    def admit(self, slot: int, admission: Admission) -> None:
        """Give the slot the rules, the seed and the penalty counts of a request, new or resumed after a preemption.

        A seed counts by its low 64 bits: -1 and 2**64 - 1 are the same.
        """
        sampling, rules = admission.sampling, self._rules.fields
        rules.temperature[slot] = sampling.temperature
        rules.top_k[slot] = min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size
        rules.top_p[slot] = sampling.top_p
        rules.min_p[slot] = sampling.min_p
        rules.repetition[slot] = sampling.repetition_penalty
        rules.presence[slot] = sampling.presence_penalty
        rules.frequency[slot] = sampling.frequency_penalty
        rules.seed[slot] = admission.seed & SEED_BITS
        rules.penalised[slot] = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self.leave(slot)
        if admission.mask is not None:
            self._masks[slot] = SlotMask(admission.mask, admission.output_token_ids)
        if sampling.logprobs is not None:
            self._num_top[slot] = sampling.logprobs
        if rules.penalised[slot]:
            rules.counts[slot] = np.bincount(self._countable(admission.output_token_ids), minlength=self.vocab_size)
            rules.counts[slot, self._countable(admission.prompt_token_ids)] |= IN_PROMPT

    def leave(self, slot: int) -> None:
        """The request that had the slot is gone; so that what was special about it costs nobody any more."""
        self._masks.pop(slot, None)
        self._num_top.pop(slot, None)

    def _countable(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """The ids that have a logit here; an embedding may know more of them than the vocabulary does."""
        ids = np.array(token_ids, np.int64)
        return ids[ids < self.vocab_size]

    def sample(
        self,
        logits: NDArray[np.float32],
        slots: Sequence[int],
        output_positions: Sequence[int],
        drafts: Sequence[int] | None = None,
        tops: NDArray[np.float32] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """One token per row of logits [rows, logits_width] (float32, C order), for these slots and output positions.

        Returns the token ids and, per row, whether it could not be sampled because it holds a NaN or +inf or
        nothing above -inf; such a row's token is -1, or -4 where it is the slot's own mask that left nothing. Rows of
        slots with a mask are masked in place. Where a slot has penalties, its token counts as output at once.
        drafts holds, per row, the guess that it was computed behind, or NO_DRAFT; None is no draft anywhere. A guess
        is right where it is the token of the row above, else the row's token is -2 and nothing was sampled.
        tops [rows, tiles or more], float32 in C order, are the largest logits of each row's tiles as the forward pass
        notes them, that of the last is overwritten; None has them looked up.
        """
        rows = len(slots)
        if logits.dtype != np.float32 or not logits.flags.c_contiguous:
            raise ValueError(f"logits must be float32 in C order, got {logits.dtype} with strides {logits.strides}")
        if logits.shape != (rows, self.logits_width) or len(output_positions) != rows:
            raise ValueError(
                f"{rows} slots and {len(output_positions)} output positions need logits of shape "
                f"({rows}, {self.logits_width}), got {logits.shape}"
            )
        tops = np.empty((rows, 0), np.float32) if tops is None else self._checked(tops, rows)
        emptied = self._mask_rows(logits, tops, slots, output_positions, drafts) if self._masks else ()
        tokens = np.empty(rows, np.int64)
        places, positions = np.array(slots, np.int64), np.array(output_positions, np.int64)
        guesses = np.full(rows, NO_DRAFT) if drafts is None else np.array(drafts, np.int64)
        wanted = Referred(Rows(logits, tops, places, positions, guesses, tokens))
        sample_by(self._entry, wanted.address, self._rules.address, self._scratch.address)
        for row in emptied:
            tokens[row] = ALL_MASKED if tokens[row] == NOT_FINITE else tokens[row]
        token_ids, flags = tokens.tolist(), (tokens == NOT_FINITE).tolist()
        if self._masks:
            self._follow(slots, token_ids)
        return token_ids, flags

    def _mask_rows(
        self,
        logits: NDArray[np.float32],
        tops: NDArray[np.float32],
        slots: Sequence[int],
        output_positions: Sequence[int],
        drafts: Sequence[int] | None,
    ) -> list[int]:
        """Mask the rows of the slots that have a mask, and note their tiles' largest anew; returns the rows in which
        that left no token. A row that is not finite stays as it is, for its fault to show."""
        emptied: list[int] = []
        for index, slot in enumerate(slots):
            if (mask := self._masks.get(slot)) is None:
                continue
            row, guesses = logits[index, : self.vocab_size], []
            for behind in range(index, -1, -1):
                if drafts is None or drafts[behind] == NO_DRAFT:
                    break
                guesses.append(drafts[behind])
            if not -np.inf < row.max() < np.inf:
                continue
            if slot in self._num_top:
                self._raw_rows[index] = row.copy()
            mask.edit(row, output_positions[index], guesses[::-1])
            if tops.size:
                note_tops_of(row, tops[index])
            if row.max() == -np.inf:
                emptied.append(index)
        return emptied

    def scores(
        self, logits: NDArray[np.float32], slots: Sequence[int], token_ids: Sequence[int]
    ) -> dict[int, TokenScore]:
        """What sample() chose from these rows, scored for the slots that ask for it, by row. To be called right after.

        The scores are those of the raw logits: what mask, penalties and temperature make of them does not count.
        """
        found: dict[int, TokenScore] = {}
        if self._num_top:
            for row, (slot, token_id) in enumerate(zip(slots, token_ids, strict=True)):
                if token_id >= 0 and (num_top := self._num_top.get(slot)) is not None:
                    raw = self._raw_rows.get(row, logits[row, : self.vocab_size])
                    score = self.scorer.score(raw, token_id, num_top)
                    assert score is not None, "a token was chosen from a row that is not finite"
                    found[row] = score
        self._raw_rows.clear()
        return found

    def _follow(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in self._masks and token_id >= 0:
                self._masks[slot].follow((token_id,))

    def _checked(self, tops: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
        tiles = self._scratch.fields.tops.size
        if tops.dtype != np.float32 or not tops.flags.c_contiguous or len(tops) != rows or tops.shape[1] < tiles:
            raise ValueError(
                f"tops must be float32 in C order, of {rows} rows and at least {tiles} tiles, "
                f"got {tops.dtype} of shape {tops.shape} with strides {tops.strides}"
            )
        return tops

    def warm_up(self) -> None:
        """Load everything that sample() may call; changes no slot."""
        self.sample(np.empty((0, self.logits_width), np.float32), [], [])


def link_compiled(link: Callable[..., int] = entry_point) -> int:
    """The compiled sampler, which is the same for all models."""
    none, nothing = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    rows = Rows(none, none, nothing, nothing, nothing, nothing)
    return link_sampler(rows, _new_rules(0, 0), _new_scratch(0), link)


def _new_rules(max_num_seqs: int, vocab_size: int) -> Rules:
    return Rules(
        temperature=np.zeros(max_num_seqs),
        top_k=np.full(max_num_seqs, vocab_size),
        top_p=np.ones(max_num_seqs),
        min_p=np.zeros(max_num_seqs),
        repetition=np.ones(max_num_seqs),
        presence=np.zeros(max_num_seqs),
        frequency=np.zeros(max_num_seqs),
        seed=np.zeros(max_num_seqs, np.uint64),
        penalised=np.zeros(max_num_seqs, np.bool_),
        # Zeroed pages take no memory until a slot with penalties writes to them.
        counts=np.zeros((max_num_seqs, vocab_size), np.int32),
    )


def _new_scratch(vocab_size: int) -> Scratch:
    return Scratch(
        penalised=np.empty(vocab_size, np.float32),
        weights=np.empty(vocab_size, np.int64),
        tops=np.empty(-(-vocab_size // COLUMNS), np.float32),
        block_tops=np.empty(-(-vocab_size // BLOCK), np.float32),
        ids=np.empty(BRACKET, np.int64),
    )


def note_tops_of(row: NDArray[np.float32], tops: NDArray[np.float32]) -> None:
    """The largest logit of each of a row's tiles, the last of which may be a part of one, over those in tops."""
    whole = row.size // COLUMNS
    row[: whole * COLUMNS].reshape(whole, COLUMNS).max(axis=1, out=tops[:whole])
    if whole * COLUMNS < row.size:
        tops[whole] = row[whole * COLUMNS :].max()
