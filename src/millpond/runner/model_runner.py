"""From a SchedulerOutput to sampled tokens: arrays, the forward pass, the sampler."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from millpond.core.block_pool import blocks_for_length
from millpond.core.sampling import SamplingParams
from millpond.core.step import (
    Admission,
    Clock,
    RequestFault,
    RequestScores,
    RunnerTimes,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
)
from millpond.kernels.attention import BLOCK, GROUP_TOKENS
from millpond.kernels.pack import Packed
from millpond.kernels.reference import Referred
from millpond.kernels.tiles import Tiles
from millpond.model.arrays import (
    Batch,
    KVCache,
    Scratch,
    Weights,
    block_places,
    get_block,
    kv_block_bytes,
    kv_storage,
    new_kv_cache,
    new_scratch,
    new_weights,
    put_block,
    touch,
)
from millpond.model.config import ModelConfig
from millpond.model.encoder import walk_of
from millpond.model.experts import link_ffn
from millpond.model.forward import forward, link_attention, link_forward
from millpond.model.outliers import PROBE_TOKENS, find_outliers, integer_layers, probe_tokens, take_out
from millpond.model.pooling import LAST
from millpond.model.weights import ModelWeights
from millpond.runner.compiled import tile_loader
from millpond.runner.pooled import embeddings_of, unit_bytes
from millpond.runner.prompt_scores import NOT_FINITE_MESSAGE, PromptScorer, ScoredPrompts, Watcher, joined
from millpond.runner.sampler import Sampler
from millpond.runner.sampler_kernels import ALL_MASKED, NO_DRAFT, NOT_FINITE

# Not every threading layer of Numba lets two threads enter a parallel region at once: one of them ends the process.
ONE_REGION = threading.Lock()
# Of the pool, how many blocks for each slot are in memory before the first request.
FIRST_BLOCKS = 4
# With fewer slots there is still room for the logits of so many of a prompt's rows at once.
PROMPT_ROWS = 32
NOTHING_TO_CHOOSE = {
    NOT_FINITE: (NOT_FINITE_MESSAGE, None),
    ALL_MASKED: (
        "allowed_token_ids, bad_words and min_tokens together leave no token to choose",
        "allowed_token_ids",
    ),
}


class ModelRunner:
    """Runs steps of one model on the CPU; owns its K/V cache and scratch. Not thread-safe: one step at a time.

    block_size is the scheduler's, a multiple of the kernels' 16: a block of 32 is two of theirs, side by side.
    pooling: how an encoder makes one vector of a prompt's rows; other models take the last token's.
    """

    def __init__(
        self,
        config: ModelConfig,
        packed: ModelWeights,
        *,
        isa: str,
        threads: int,
        dtype: str,
        kv_dtype: str,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        max_drafts: int = 0,
        pooling: str = LAST,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock, self._pooling = clock, pooling
        self.config, self._packed, self._kv_dtype = config, packed, kv_storage(dtype, kv_dtype)
        self._max_rows, self._max_model_len, self._vocab_size = max_num_batched_tokens, max_model_len, vocab_size
        self._per_block = block_size // BLOCK
        self._first_blocks = FIRST_BLOCKS * max_num_seqs * self._per_block
        self._weights: Weights = new_weights(config, packed, max(max_model_len, PROBE_TOKENS), isa)
        self._num_blocks = num_blocks * self._per_block  # the kernels'
        self._places = block_places(config, max(self._num_blocks, PROBE_TOKENS))
        self._cache: KVCache = new_kv_cache(config, self._num_blocks, self._kv_dtype)
        self._scratch: Scratch = new_scratch(
            config,
            self._kv_dtype,
            rows=max_num_batched_tokens,
            sampled=min(max(max_num_seqs * (1 + max_drafts), PROMPT_ROWS), max(max_num_seqs, max_num_batched_tokens)),
            max_model_len=max_model_len,
            threads=threads,
        )
        self.sampler = Sampler(max_num_seqs, vocab_size, self._scratch.logits.shape[1])
        self._special: dict[int, tuple[str, SamplingParams]] = {}
        self._prompts = PromptScorer(self.sampler.scorer, self._all_logits, len(self._scratch.logits))
        self._link(tile_loader(config, packed.kinds, self._kv_dtype, isa, threads))
        self.outliers = self._take_out_outliers()

    def _link(self, load: Callable[..., Tiles]) -> None:
        """Load, or compile, what a step calls."""
        tiles = load()
        if not self.config.is_encoder:
            self._weights = self._weights._replace(ffn=link_ffn(tiles, self._weights, self._scratch))
        others = self._cache, self._batch(()), self._scratch
        self._weights = self._weights._replace(attention=link_attention(tiles, self._weights, *others))
        arguments = tiles, self._weights, *others
        self._entry = link_forward(walk_of(self.config), *arguments)
        self._tiles = Referred(tiles)
        self._own = Referred(self._weights), Referred(self._cache), Referred(self._scratch)

    def _take_out_outliers(self) -> tuple[NDArray[np.int64], ...]:
        """Tell the layers' descriptors of the outlier channels, those that came with the weights or a probe's."""
        layers = zip(self._packed.layers, self._weights.layers, strict=True)
        pairs = [pair for each, rows in layers for pair in zip(each, rows, strict=True)]
        pairs.append((self._packed.head, self._weights.head))
        if not integer_layers(pairs):  # nothing is rounded to 8 bits on its way
            return tuple(np.empty(0, np.int64) for _ in self._packed.integer_layers)
        known = self._packed.outliers
        outliers = self._find_outliers(pairs) if known is None else known
        if known is None:
            for layer, exact, channels in zip(self._packed.integer_layers, self._packed.exact, outliers, strict=True):
                layer.put_outliers(exact(channels))
        take_out(pairs, outliers)
        return outliers

    def _find_outliers(self, pairs: list[tuple[Packed, NDArray[np.int64]]]) -> tuple[NDArray[np.int64], ...]:
        """Probe on one thread, in a cache and a scratch of its own: the choice must not depend on any setting."""
        config, tokens = self.config, probe_tokens(self.config.vocab_size)[: self.config.context_length]
        blocks = blocks_for_length(len(tokens), BLOCK * self._per_block)
        cache = new_kv_cache(config, blocks * self._per_block, self._kv_dtype)
        count = len(tokens)
        scratch = new_scratch(
            config, self._kv_dtype, rows=count, sampled=count, max_model_len=blocks * self._per_block * BLOCK, threads=1
        )

        def probe() -> None:
            batch = self._batch([ScheduledRequest("probe", 0, 0, tuple(tokens), tuple(range(blocks)), True, 0)])
            batch = batch._replace(sampled=np.arange(count))
            self._forward(batch, scratch, Referred(self._tiles.fields._replace(threads=1)), cache)

        return tuple(find_outliers(pairs, probe))

    def _forward(
        self, batch: Batch, scratch: Scratch, tiles: Referred[Tiles] | None = None, cache: KVCache | None = None
    ) -> None:
        tiles, (weights, own_cache, own_scratch) = tiles or self._tiles, self._own
        to_cache = own_cache if cache is None else Referred(cache)
        to_scratch = own_scratch if scratch is self._scratch else Referred(scratch)
        # The width of a parallel region is a property of the thread that enters it, which need not be the one that
        # built this runner.
        with ONE_REGION:
            numba.set_num_threads(tiles.fields.threads)
            forward(self._entry, tiles, weights, to_cache, Referred(batch), to_scratch)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step; a request whose logits are not finite gets a fault instead of a token."""
        started = self._clock()
        if self.config.is_encoder:
            return self._encode(output.scheduled, started)
        for load in output.loads:
            for place, part in self._parts(load.block_id, load.data):
                put_block(self._cache, place, part)
        self._seat(output)
        scoring, prompts = 0.0, ScoredPrompts(output.scheduled)
        if self._prompts.has_work:
            seated = self._clock()
            prompts = self._prompts.take(output.scheduled)
            scoring = self._clock() - seated
        scheduled = prompts.left
        batch = self._batch(scheduled)
        prepared = self._clock()
        if scheduled:
            self._forward(batch, self._scratch)
        computed = self._clock()
        sampled, faults, scores = self._sample([each for each in scheduled if each.samples])
        times = RunnerTimes(prepared - started - scoring, computed - prepared + scoring, self._clock() - computed)
        return StepResult(sampled, faults + prompts.faults, times, joined(scores, prompts.scores))

    def _encode(self, scheduled: Sequence[ScheduledRequest], started: float) -> StepResult:
        """A step of an encoder, in which all prompts are whole."""
        batch = self._batch(scheduled)
        prepared = self._clock()
        self._forward(batch, self._scratch)
        computed = self._clock()
        hidden = self._scratch.hidden[:, : self.config.hidden_size]
        sampled, faults, scores = embeddings_of(scheduled, hidden, self._pooling)
        times = RunnerTimes(prepared - started, computed - prepared, self._clock() - computed)
        return StepResult(sampled, faults, times, scores)

    def _seat(self, output: SchedulerOutput) -> None:
        """Tell the sampler who has taken a slot, and which of those that were special there are gone."""
        if self._special:
            gone = output.released + output.preempted
            for slot in [slot for slot, (request_id, _) in self._special.items() if request_id in gone]:
                del self._special[slot]
                self.sampler.leave(slot)
                self._prompts.leave(slot)
        for each in output.scheduled:
            if each.admission is not None:
                self.sampler.admit(each.slot, each.admission)
                self._prompts.admit(each.slot, each.admission)
                self._special.pop(each.slot, None)
                if is_special(each.admission):
                    self._special[each.slot] = each.request_id, each.admission.sampling

    def _sample(
        self, sampling: Sequence[ScheduledRequest]
    ) -> tuple[tuple[SampledTokens, ...], tuple[RequestFault, ...], tuple[RequestScores, ...]]:
        """What came of the logits' rows, which are those of each request in turn."""
        slots, positions, guesses = [], [], []
        for each in sampling:
            count = 1 + each.num_drafts
            slots += [each.slot] * count
            positions += range(each.output_position, each.output_position + count)
            guesses.append(NO_DRAFT)
            if each.num_drafts:
                guesses += each.token_ids[-each.num_drafts :]
        if not slots:
            return (), (), ()
        logits, tops = self._scratch.logits[: len(slots)], self._scratch.tops[: len(slots)]
        token_ids, _ = self.sampler.sample(logits, slots, positions, guesses, tops)
        scored = self.sampler.scores(logits, slots, token_ids) if self._special else {}
        sampled, faults, scores, row = [], [], [], 0
        for each in sampling:
            first, row = row, row + 1 + each.num_drafts
            rows = token_ids[first:row]
            # Below 0 are rows behind a wrong guess and those without finite logits.
            if tokens := tuple([token_id for token_id in rows if token_id >= 0]):
                sampled.append(SampledTokens(each.request_id, tokens))
                if scored and first in scored:
                    own = tuple([scored[first + index] for index in range(len(tokens))])
                    scores.append(RequestScores(each.request_id, own))
                if each.slot in self._special and self._special[each.slot][1].embedding and not each.output_position:
                    known = scores.pop() if scored and first in scored else RequestScores(each.request_id)
                    scores.append(known._replace(embedding=self._embedding(first)))
            else:
                faults.append(RequestFault(each.request_id, *NOTHING_TO_CHOOSE[rows[0]]))
        return tuple(sampled), tuple(faults), tuple(scores)

    def _embedding(self, row: int) -> bytes:
        """The hidden state of a sampled row behind the last norm, of length 1, as little-endian float32."""
        norm = self._weights.norms[-1].astype(np.float64)
        return unit_bytes(self._scratch.last[row, : norm.size].astype(np.float64) * norm)

    def _all_logits(self, chunk: ScheduledRequest) -> NDArray[np.float32]:
        """The logits of every row of a chunk that fits the scratch, which keeps them until the next forward."""
        batch = self._batch([chunk._replace(samples=True)])._replace(sampled=np.arange(len(chunk.token_ids)))
        self._forward(batch, self._scratch)
        return self._scratch.logits[: len(chunk.token_ids), : self._vocab_size]

    def _batch(self, scheduled: Sequence[ScheduledRequest]) -> Batch:
        # Lists, and an array of each at the end: with few rows, calls of numpy take longer than all their arithmetic.
        tokens, positions, slots, cleared = [], [], [], []
        groups, tables, sampled = [], [], []
        widest = max([len(each.block_ids) for each in scheduled], default=0) * self._per_block
        for sequence, each in enumerate(scheduled):
            table, row = self._table(each.block_ids), len(tokens)
            first, count = each.first_position, len(each.token_ids)
            own = range(first, first + count)
            tokens += each.token_ids
            positions += own
            slots += [table[position // BLOCK] * BLOCK + position % BLOCK for position in own]
            cleared += [0] * count
            last_offset = own[-1] % BLOCK
            if count > last_offset:  # the block of the last token begins in this chunk
                cleared[-1] = BLOCK - 1 - last_offset
            for start in range(0, count, GROUP_TOKENS):
                context = count if self.config.is_encoder else first + start + 1
                groups += (row + start, min(GROUP_TOKENS, count - start), sequence, context)
            if each.samples:
                sampled += range(row + count - 1 - each.num_drafts, row + count)
            tables += table
            tables += [0] * (widest - len(table))
        blocks, offsets = np.divmod(np.array(slots, np.int64), BLOCK)
        return Batch(
            np.array(tokens, np.int64),
            np.array(positions, np.int64),
            self._places[blocks] * BLOCK + offsets,
            np.array(cleared, np.int64),
            np.array(groups, np.int64).reshape(-1, 4),
            self._places[np.array(tables, np.int64).reshape(len(scheduled), widest)],
            np.array(sampled, np.int64),
        )

    def _table(self, block_ids: Sequence[int]) -> Sequence[int]:
        """The kernels' blocks of a block table."""
        if self._per_block == 1:
            return block_ids
        return [block * self._per_block + part for block in block_ids for part in range(self._per_block)]

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> NDArray[np.float32]:
        """Logits [len(token_ids), vocab_size] of every position, through the paged cache in chunks of `chunk` tokens.

        For evaluation and tests: it overwrites the cache's first blocks, so no request may be running.
        """
        if self.config.is_encoder:
            raise ValueError("an encoder has no logits")
        room = min(self._max_model_len, self._num_blocks * BLOCK)
        if not 0 < len(token_ids) <= room:
            raise ValueError(f"from 1 to {room} tokens have room here, got {len(token_ids)}")
        if min(token_ids) < 0 or max(token_ids) >= self.config.vocab_size:
            raise ValueError(f"token ids must be from 0 to {self.config.vocab_size - 1}")
        chunk = min(chunk or self._max_rows, self._max_rows)
        block_ids = tuple(range(blocks_for_length(len(token_ids), BLOCK * self._per_block)))
        own = self._scratch
        last, logits, tops = (np.zeros((chunk, each.shape[1]), np.float32) for each in (own.last, own.logits, own.tops))
        scratch = own._replace(last=last, logits=logits, tops=tops)
        rows = []
        for first in range(0, len(token_ids), chunk):
            part = tuple(token_ids[first : first + chunk])
            batch = self._batch([ScheduledRequest("eval", 0, first, part, block_ids, True, 0)])
            batch = batch._replace(sampled=np.arange(len(part)))
            self._forward(batch, scratch)
            rows.append(scratch.logits[: len(part), : self._vocab_size].copy())
        return np.concatenate(rows)

    def watch_prompts(self, watcher: Watcher) -> None:
        """Have the logits of all scored prompts shown to somebody."""
        self._prompts.watcher = watcher

    @property
    def block_bytes(self) -> int:
        """Bytes of K/V in one of the scheduler's blocks."""
        return self._per_block * kv_block_bytes(self.config, self._kv_dtype)

    def read_block(self, block_id: int, into: memoryview) -> None:
        """Copy the K/V of a block; in any thread, as long as no step writes the block."""
        for place, part in self._parts(block_id, into):
            get_block(self._cache, place, part)

    def _parts(self, block_id: int, data: bytes | memoryview) -> Iterable[tuple[int, NDArray[np.uint8]]]:
        """The kernels' blocks of a block: their places, and their bytes in its data."""
        parts = np.frombuffer(data, np.uint8).reshape(self._per_block, -1)
        return zip(self._places[self._table([block_id])].tolist(), parts, strict=True)

    def warm_up(self) -> None:
        """Compile (or load) everything that a step can call, and use the memory of the first steps once: no request
        waits for the one, or for the system to find and clear pages."""
        touch(self._cache, self._scratch, self._places[: min(self._first_blocks, self._num_blocks)])
        if self.config.is_encoder:
            self._forward(self._batch([ScheduledRequest("warm up", 0, 0, (0,), (0,), True, 0)]), self._scratch)
            return
        self.logits([0])
        self.sampler.warm_up()


def is_special(admission: Admission) -> bool:
    """Whether a request's rows want more than the compiled sampler does for all of them."""
    return admission.sampling.wants_scores or admission.mask is not None
