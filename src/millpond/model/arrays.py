"""What the compiled forward pass is given, as named tuples of arrays: weights, K/V cache, the step, scratch room."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.core.block_pool import RUN
from millpond.kernels.attention import BLOCK, GROUP_TOKENS
from millpond.kernels.attention_int8 import code_bytes, query_bytes, scale_bytes
from millpond.kernels.matmul import (
    ADDS,
    COLUMNS,
    DESCRIPTOR_SIZE,
    GROUP,
    LINE,
    MOST_OUTLIERS,
    ROW_BLOCK,
    UNIT,
)
from millpond.kernels.pack import aligned_zeros, new_unpacked, padded
from millpond.kernels.threads import new_sync
from millpond.model.config import NO_ROPE, ModelConfig
from millpond.model.experts import NUM_SLOT_LISTS
from millpond.model.forward import DOWN, OUT
from millpond.model.rope import tables
from millpond.model.weights import ModelWeights, linears_each


class Weights(NamedTuple):
    """layers: int64 [layers, 4, 9], descriptors of q k v, o, gate up, down; embedding, head: int64 [9]. With experts
    [layers, 3 + 2 * experts, 9]: q k v, o, router, gate up and down of each.

    norms: float32 [2 * layers + 1, hidden]; after, biases, query_key_norms: as in ModelWeights. cosine, sine: float32
    [tables, positions, head_dim / 2]. turns: int64 [layers], the table of each layer; windows: int64 [layers], how many
    positions each attends to, 0 for all. norm_biases, sum_biases, up_biases, positions: an encoder's, as there.

    From norms_before on: how a layer differs from Llama's, 0 or 1 but where it says something else. branches: what a
    block gives goes to scratch.branch, and from there into the hidden state. query_key_norm: 0, 1 for each head, 2 for
    all heads at once. Caps are 0 where there is none; logits are divided in the last norm. attention,
    ffn: addresses of what a walk calls, the latter of experts.py's function or of forward.py's gate_and_up.
    """

    layers: NDArray[np.int64]
    embedding: NDArray[np.int64]
    head: NDArray[np.int64]
    norms: NDArray[np.float32]
    after: NDArray[np.float32]
    biases: NDArray[np.float32]
    query_key_norms: NDArray[np.float32]
    norm_biases: NDArray[np.float32]
    sum_biases: NDArray[np.float32]
    up_biases: NDArray[np.float32]
    positions: NDArray[np.float32]
    cosine: NDArray[np.float32]
    sine: NDArray[np.float32]
    turns: NDArray[np.int64]
    windows: NDArray[np.int64]
    epsilon: np.float32
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norms_before: int
    norms_after: int
    branches: int
    biased: int
    query_key_norm: int
    gelu: int
    both_ways: int
    num_experts: int
    experts_used: int
    normalise_experts: int
    attention: int
    ffn: int
    score_scale: np.float32
    score_cap: np.float32
    logit_cap: np.float32
    embedding_scale: np.float32
    residual_scale: np.float32


class KVCache(NamedTuple):
    """keys, values [layers, places, kv_heads, ...]: uint16 (bfloat16 bits), float32, or uint8, as attention.py and
    attention_int8.py draw them; key_scales, value_scales: uint8, as wide as 8-bit numbers want them, or 0.

    RUN blocks that follow each other stand side by side, [runs, layers, kv_heads, keys and values, RUN]: what a head
    reads of a sequence that has them is a run of memory, which the processor fetches ahead by itself. An array is a
    view in which a block has the same place in every layer and head; block_places says which.
    """

    keys: NDArray[np.generic]
    values: NDArray[np.generic]
    key_scales: NDArray[np.generic]
    value_scales: NDArray[np.generic]


class Batch(NamedTuple):
    """One step. tokens, positions, slots: int64 [rows], a slot being 16 * place + offset where the row's K/V goes.

    cleared: int64 [rows], how many positions after the row's in its block are to be zeroed: those that nothing has
    written yet, for the last row in a block that this step begins.
    groups: int64 [groups, 4], each [first row, rows, sequence, context length of the first row]: up to GROUP_TOKENS
    consecutive tokens of one sequence; an encoder's rows all have the first one's. tables: int64 [sequences, blocks],
    of places. sampled: int64, the rows that want logits.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    cleared: NDArray[np.int64]
    groups: NDArray[np.int64]
    tables: NDArray[np.int64]
    sampled: NDArray[np.int64]


class Scratch(NamedTuple):
    """Room for one step of up to `rows` tokens; see new_scratch for the shapes, experts.py for routed and slots."""

    hidden: NDArray[np.float32]
    last: NDArray[np.float32]
    inputs: NDArray[np.uint8]
    sums: NDArray[np.float32]
    qkv: NDArray[np.float32]
    queries: NDArray[np.generic]
    attended: NDArray[np.float32]
    ffn: NDArray[np.float32]
    ffn_inputs: NDArray[np.uint8]
    ffn_sums: NDArray[np.float32]
    branch: NDArray[np.float32]
    routed: NDArray[np.float32]
    slots: NDArray[np.int64]
    expert_inputs: NDArray[np.uint8]
    expert_sums: NDArray[np.float32]
    expert_outputs: NDArray[np.float32]
    logits: NDArray[np.float32]
    tops: NDArray[np.float32]
    unpacked: NDArray[np.uint8]
    row: NDArray[np.float32]
    scores: NDArray[np.float32]
    factors: NDArray[np.float32]
    sync: NDArray[np.int64]


def new_weights(config: ModelConfig, weights: ModelWeights, max_model_len: int, isa: str) -> Weights:
    """The addresses of packed weights (which must outlive the result), to be multiplied by these instructions, and the
    rotation tables up to max_model_len."""
    layers = np.array([[each.descriptor(isa) for each in layer] for layer in weights.layers], dtype=np.int64)
    assert layers.shape == (config.num_layers, linears_each(config), DESCRIPTOR_SIZE)
    if not config.has_branches:
        layers[:, [OUT, DOWN], ADDS] = 1  # they add to the hidden state
    ropes = [*config.ropes, None] if NO_ROPE in config.rope_of else config.ropes
    cosine, sine = tables(ropes, config.turned_dims, config.head_dim, max_model_len, weights.rope_factors)
    return Weights(
        layers=layers,
        embedding=np.array(weights.embedding.descriptor(None), dtype=np.int64),
        head=np.array(weights.head.descriptor(isa), dtype=np.int64),
        norms=weights.norms,
        after=weights.after,
        biases=weights.biases,
        query_key_norms=weights.query_key_norms,
        norm_biases=weights.norm_biases,
        sum_biases=weights.sum_biases,
        up_biases=weights.up_biases,
        positions=weights.positions,
        cosine=cosine,
        sine=sine,
        turns=np.array(config.rope_of or [0] * config.num_layers, np.int64) % len(ropes),  # NO_ROPE: the last
        windows=np.array(config.windows or [0] * config.num_layers, np.int64),
        epsilon=np.float32(config.norm_epsilon),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_size=config.ffn_size,
        **_options(config),
    )


def no_weights(config: ModelConfig) -> Weights:
    """Weights of no size, of the types that new_weights gives: for compiling before there are weights."""
    none = [np.empty((0,) * axes, np.float32) for axes in range(4)]
    numbers = [np.empty((0,) * axes, np.int64) for axes in range(4)]
    return Weights(
        layers=numbers[3],
        embedding=numbers[1],
        head=numbers[1],
        norms=none[2],
        after=none[2],
        biases=none[2],
        query_key_norms=none[2],
        norm_biases=none[2],
        sum_biases=none[2],
        up_biases=none[2],
        positions=none[2],
        cosine=none[3],
        sine=none[3],
        turns=numbers[1],
        windows=numbers[1],
        epsilon=np.float32(config.norm_epsilon),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_size=config.ffn_size,
        **_options(config),
    )


def no_batch() -> Batch:
    """A step of no rows."""
    none, lists = np.empty(0, np.int64), np.empty((0, 0), np.int64)
    return Batch(none, none, none, none, lists, lists, none)


def _options(config: ModelConfig) -> dict[str, Any]:
    block = config.block
    usual = np.float32(1) / np.sqrt(np.float32(config.head_dim))
    return {
        "norms_before": int(block.norms in ("before", "both")),
        "norms_after": int(block.norms in ("after", "both")),
        "branches": int(config.has_branches),
        "biased": int(block.qkv_bias),
        "query_key_norm": ("none", "each head", "all heads").index(block.query_key_norm),
        "gelu": int(block.activation == "gelu"),
        "both_ways": int(block.encoder),
        "num_experts": config.num_experts,
        "experts_used": config.experts_used,
        "normalise_experts": int(config.normalise_experts),
        "attention": 0,
        "ffn": 0,
        "score_scale": np.float32(config.attention_scale) if config.attention_scale else usual,
        "score_cap": np.float32(config.score_cap),
        "logit_cap": np.float32(config.logit_cap),
        "embedding_scale": np.float32(config.embedding_scale),
        "residual_scale": np.float32(config.residual_scale),
    }


def new_kv_cache(config: ModelConfig, num_blocks: int, dtype: type[np.generic]) -> KVCache:
    """Zeroed keys and values for num_blocks blocks of 16 positions, and what their last run has room for; dtype uint16
    (bfloat16 bits), float32 or uint8."""
    dim = config.head_dim
    shapes: dict[type[np.generic], tuple[tuple[int, ...], ...]] = {
        np.float32: ((dim, BLOCK), (BLOCK, dim)),
        np.uint16: ((dim // 2, BLOCK, 2), (BLOCK // 2, dim, 2)),
        np.uint8: ((code_bytes(dim),), (code_bytes(dim),)),
    }
    scales = (scale_bytes(dim),) if dtype is np.uint8 else (0,)
    keys, values = _in_runs(config, num_blocks, dtype, shapes[dtype])
    return KVCache(keys, values, *_in_runs(config, num_blocks, np.uint8, (scales, scales)))


def _in_runs(
    config: ModelConfig, num_blocks: int, dtype: type[np.generic], shapes: tuple[tuple[int, ...], ...]
) -> list[NDArray[np.generic]]:
    """Two parts of a block, of as many numbers each, as views [layers, places, kv_heads, ...] of one array."""
    runs, layers, heads = -(-num_blocks // RUN), config.num_layers, config.num_kv_heads
    memory = aligned_zeros((runs, layers, heads, 2, RUN, math.prod(shapes[0])), dtype)
    places = (runs - 1) * layers * heads * 2 * RUN + RUN
    _, layer, head, _, block, number = memory.strides
    return [
        np.lib.stride_tricks.as_strided(
            memory[0, 0, 0, part],
            (layers, places, heads, *shape),
            (layer, block, head, *(number * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))),
        )
        for part, shape in enumerate(shapes)
    ]


def block_places(config: ModelConfig, num_blocks: int) -> NDArray[np.int64]:
    """Where the blocks are in a cache, along its axis of places: int64 [num_blocks]."""
    run, block = np.divmod(np.arange(num_blocks), RUN)
    return run * (config.num_layers * config.num_kv_heads * 2 * RUN) + block


def get_block(cache: KVCache, place: int, into: NDArray[np.uint8]) -> None:
    """Copy what a block holds of all layers and heads to kv_block_bytes bytes: keys, values and their scales."""
    for own, data in _parts(cache, place, into):
        np.copyto(data, own)


def put_block(cache: KVCache, place: int, data: NDArray[np.uint8]) -> None:
    """The opposite of get_block."""
    for own, part in _parts(cache, place, data):
        np.copyto(own, part)


def _parts(
    cache: KVCache, place: int, data: NDArray[np.uint8]
) -> Iterator[tuple[NDArray[np.generic], NDArray[np.generic]]]:
    start = 0
    for part in cache:
        own = part[:, place]
        yield own, data[start : start + own.nbytes].view(own.dtype).reshape(own.shape)
        start += own.nbytes


def kv_storage(dtype: str, kv_dtype: str) -> type[np.generic]:
    """The type of the arrays that hold K/V for a config's dtype and kv_dtype."""
    if kv_dtype == "int8":
        return np.uint8
    return np.float32 if dtype == "float32" else np.uint16


def kv_block_bytes(config: ModelConfig, dtype: type[np.generic]) -> int:
    """Bytes of K/V that a block of 16 positions takes over all layers."""
    each = BLOCK * config.head_dim * np.dtype(dtype).itemsize
    if dtype is np.uint8:
        each += scale_bytes(config.head_dim)
    return config.num_layers * config.num_kv_heads * 2 * each


def new_scratch(
    config: ModelConfig, kv_dtype: type[np.generic], *, rows: int, sampled: int, max_model_len: int, threads: int
) -> Scratch:
    """Room for steps of up to `rows` tokens of which `sampled` want logits."""
    narrow = max(config.hidden_size, config.num_heads * config.head_dim)
    depth = max(2 * narrow, config.ffn_size)  # of a tile to unpack, or of gate and up at once
    width = config.heads_per_kv * config.head_dim
    query_width = config.heads_per_kv * query_bytes(config.head_dim) if kv_dtype is np.uint8 else width
    heads = config.num_heads + 2 * config.num_kv_heads
    blocks, group_rows = -(-max_model_len // BLOCK), GROUP_TOKENS * config.heads_per_kv
    slots = rows * max(config.experts_used, 1)  # the rows that go through an FFN
    routed, branch_rows = slots if config.num_experts else 0, max(rows, sampled) if config.has_branches else 0
    score_bytes = (blocks | 1) * LINE  # of a row, an odd number of lines: 16 rows do not share sets of the first cache
    return Scratch(
        hidden=aligned_zeros((rows, padded(config.hidden_size)), np.float32),
        last=aligned_zeros((sampled, padded(config.hidden_size)), np.float32),
        inputs=aligned_zeros(max(rows, sampled) * (narrow * 4 + LINE)),
        sums=aligned_zeros((max(rows, sampled), narrow // GROUP * 2 + MOST_OUTLIERS), np.float32),
        qkv=aligned_zeros((rows, padded(heads * config.head_dim)), np.float32),
        queries=aligned_zeros((config.num_kv_heads, rows, query_width), kv_dtype),
        attended=aligned_zeros((config.num_kv_heads, rows, width), np.float32),
        ffn=aligned_zeros((threads, ROW_BLOCK, 2 * UNIT), np.float32),
        ffn_inputs=aligned_zeros(slots * (config.ffn_size * 4 + LINE)),
        ffn_sums=aligned_zeros((slots, config.ffn_size // GROUP * 2 + MOST_OUTLIERS), np.float32),
        branch=aligned_zeros((branch_rows, padded(config.hidden_size)), np.float32),
        routed=aligned_zeros((rows if routed else 0, padded(config.num_experts) + config.experts_used), np.float32),
        slots=np.zeros((NUM_SLOT_LISTS, max(routed, config.num_experts + 1)), np.int64),
        expert_inputs=aligned_zeros(routed * (config.hidden_size * 4 + LINE)),
        expert_sums=aligned_zeros((routed, config.hidden_size // GROUP * 2 + MOST_OUTLIERS), np.float32),
        expert_outputs=aligned_zeros((routed, padded(config.hidden_size)), np.float32),
        logits=aligned_zeros((sampled, padded(config.vocab_size)), np.float32),
        tops=aligned_zeros((sampled, padded(config.vocab_size) // COLUMNS), np.float32),
        unpacked=new_unpacked(depth, threads),
        row=aligned_zeros((threads, narrow), np.float32),
        scores=aligned_zeros((threads, group_rows, score_bytes // 4), np.float32),
        factors=aligned_zeros((threads, group_rows), np.float32),
        sync=new_sync(threads),
    )


def touch(cache: KVCache, scratch: Scratch, places: NDArray[np.int64]) -> None:
    """Write zeros over the cache's blocks at these places and the scratch, so that the system has found memory for
    them: a huge page takes it up to milliseconds."""
    for array in cache:
        array[:, places] = 0
    for array in scratch:
        array.fill(0)
