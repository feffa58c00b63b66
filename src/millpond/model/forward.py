"""The forward pass, as one compiled call. What an architecture does otherwise than Llama is a branch on an option.

A step walks the layers in phases; in each phase the threads share out rows, tiles or heads, then wait for all:
embed | norm | q k v | rotate, write K/V | attend | gather | o | norm | gate * up | down | ... | norm | head
"""

import numpy as np
from numba import njit, prange, typeof, types

from millpond.kernels.attention import BLOCK, attend
from millpond.kernels.attention_int8 import quantise_query
from millpond.kernels.embedding import embed
from millpond.kernels.jit import OPTIONS, inner, inner_copy, merged
from millpond.kernels.link import call, entry_point
from millpond.kernels.matmul import (
    AMX_ROWS,
    AMX_U4,
    COLUMN_COUNT,
    COLUMNS,
    DEPTH,
    KIND,
    LINE,
    MAGNITUDES,
    ROWS,
    UNIT,
    fetch,
    gated_by_amx,
    input_stride,
    linear,
    linear_tile,
    rows_at_once,
)
from millpond.kernels.pointwise import (
    add_row,
    add_scaled,
    cap_row,
    copy_row,
    geglu_row,
    prepare,
    rms_norm,
    rotate,
    round_row,
    scale_row,
    swiglu_row,
    write_key,
    write_value,
)
from millpond.kernels.reference import reference_to
from millpond.kernels.simd import address
from millpond.kernels.threads import shared_items, start_phases
from millpond.kernels.tops import note_tops

QKV, OUT, GATE_UP, DOWN = range(4)


# The originals have a way in from Python, for whoever wants to try them alone.
attend, embed = (inner_copy(each, inline="always") for each in (attend, embed))
linear, prepare = inner_copy(linear), inner_copy(prepare)
rms_norm, rotate, write_key, write_value = (inner_copy(each) for each in (rms_norm, rotate, write_key, write_value))
start_phases = inner_copy(start_phases)


def forward(entry, tiles, weights, cache, batch, scratch):
    """Run one step: writes the rows' K/V into the cache and the sampled rows' logits into scratch.logits, the largest
    of each of the head's tiles into scratch.tops. All but entry are Referred.

    entry: the address of a walk, from `link_forward`.
    """
    addresses = tiles.address, weights.address, cache.address, batch.address, scratch.address
    walk_together(entry, tiles.fields.threads, scratch.fields.sync, *addresses)


@njit(cache=True, parallel=True, **OPTIONS)
def walk_together(entry, threads, sync, tiles, weights, cache, batch, scratch):
    """`walk` in each of so many threads. The same for all models: what they differ in is behind the addresses."""
    start_phases(sync)
    for thread in prange(threads):
        call(entry, thread, tiles, weights, cache, batch, scratch)


def link_attention(tiles, weights, cache, batch, scratch, link=entry_point):
    """Compile (or load) `attend_groups` for such arguments; returns its address, for weights.attention. link does it,
    as in load_tiles."""
    kinds = reference_to(tiles), reference_to(weights), types.int64, reference_to(cache, any_strides=True)
    return link(attend_groups, types.int64, *kinds, reference_to(batch), reference_to(scratch))


def link_forward(walker, tiles, weights, cache, batch, scratch, link=entry_point):
    """Compile (or load) what a step calls, for such arguments; returns the address of walker: `walk`, or an encoder's.
    link does it, as in load_tiles."""
    kinds = reference_to(tiles), reference_to(weights), reference_to(cache, any_strides=True)
    entry = link(walker, types.int64, *kinds, reference_to(batch), reference_to(scratch))
    link(walk_together, types.int64, types.int64, typeof(scratch.sync), *[types.int64] * 5)
    return entry


@inner
def walk(thread, tiles, weights, cache, batch, scratch):
    """One thread's part of a step. Each call is a phase and returns when all of the phase's work is done.

    After the last attention only the rows that want logits go on, in scratch.last.
    """
    sync, rows, hidden, unpacked = scratch.sync, batch.tokens.size, scratch.hidden, scratch.unpacked[thread]
    inputs, sums, layers = scratch.inputs, scratch.sums, weights.layers
    embed_rows(thread, weights, batch, scratch)
    for i in range(len(layers)):
        layer, keys, values = layers[i], cache.keys[i], cache.values[i]
        key_scales, value_scales = cache.key_scales[i], cache.value_scales[i]
        is_last = i + 1 == len(layers)
        norm_rows(thread, weights, 2 * i, layer[QKV], rows, hidden, scratch)
        linear(tiles, sync, thread, layer[QKV], rows, inputs, sums, scratch.qkv, unpacked)
        rotate_rows(thread, weights, i, keys, values, key_scales, value_scales, batch, scratch)
        call(weights.attention, thread, tiles, weights, i, cache, batch, scratch)
        if is_last:
            rows, hidden = batch.sampled.size, scratch.last
        given = scratch.branch if weights.branches else hidden
        gather_rows(thread, weights, layer[OUT], rows, is_last, batch.sampled, scratch)
        linear(tiles, sync, thread, layer[OUT], rows, inputs, sums, given, unpacked)
        norm_rows(thread, weights, 2 * i + 1, layer[GATE_UP], rows, hidden, scratch)
        call(weights.ffn, thread, tiles, weights, layer, rows, scratch)
        if not weights.num_experts:
            linear(tiles, sync, thread, layer[DOWN], rows, scratch.ffn_inputs, scratch.ffn_sums, given, unpacked)
    norm_rows(thread, weights, 2 * len(layers), weights.head, rows, hidden, scratch)
    head_tiles(tiles, thread, weights, rows, scratch)


@merged
def embed_rows(thread, weights, batch, scratch):
    for m in shared_items(scratch.sync, thread, batch.tokens.size):
        embed(weights.embedding, batch.tokens[m], scratch.hidden[m])
        if weights.embedding_scale != 1:
            scale_row(address(scratch.hidden, m), weights.embedding_scale, scratch.hidden.shape[1] // 16)


@inner
def norm_rows(thread, weights, n, layer, rows, hidden, scratch):
    """The norms of the hidden rows, by gains n, as the input of a linear layer; what the block before has left in
    scratch.branch is added first."""
    row, size = scratch.row[thread], weights.norms.shape[1]
    for m in shared_items(scratch.sync, thread, rows):
        if weights.branches and n > 0:
            given = scratch.branch[m]
            if weights.norms_after:
                rms_norm(given, weights.after[n - 1], weights.epsilon, given)
            add_scaled(address(given), weights.residual_scale, address(hidden, m), hidden.shape[1] // 16)
        if weights.norms_before or n == len(weights.norms) - 1:
            rms_norm(hidden[m], weights.norms[n], weights.epsilon, row)
        else:
            copy_row(address(hidden, m), address(row), size // 16)
        place = address(scratch.inputs) + m * input_stride(layer)
        prepare(layer, row[:size], np.int64(0), place, address(scratch.sums, m))


@merged
def finish_row(weights, i, qkv):
    """A row of q k v with its biases, its queries and keys with their norms."""
    dim, turned = weights.head_dim, (weights.num_heads + weights.num_kv_heads) * weights.head_dim
    if weights.biased:
        add_row(address(weights.biases, i), address(qkv), weights.biases.shape[1] // 16)
    if weights.query_key_norm:
        gains, first = weights.query_key_norms[i], np.int64(0)
        while first < turned:
            end = first + dim
            if weights.query_key_norm == 2:
                end = turned if first else weights.num_heads * dim
            rms_norm(qkv[first:end], gains[first:end], weights.epsilon, qkv[first:end])
            first = end


@merged
def rotate_rows(thread, weights, i, keys, values, key_scales, value_scales, batch, scratch):
    """Rotate queries and keys; queries go to [kv_head][row][head of the group], keys and values into their block."""
    dim, per_kv, turn = weights.head_dim, weights.num_heads // weights.num_kv_heads, weights.turns[i]
    row = scratch.row[thread]
    for m in shared_items(scratch.sync, thread, batch.tokens.size):
        qkv, block, offset = scratch.qkv[m], batch.slots[m] // BLOCK, batch.slots[m] % BLOCK
        cosine, sine = weights.cosine[turn, batch.positions[m]], weights.sine[turn, batch.positions[m]]
        if weights.biased or weights.query_key_norm:
            finish_row(weights, i, qkv)
        for h in range(weights.num_heads):
            rotate(qkv[h * dim : (h + 1) * dim], cosine, sine, row)
            query = address(scratch.queries, h // per_kv, m) + h % per_kv * (scratch.queries.strides[1] // per_kv)
            if scratch.queries.itemsize == 1:
                quantise_query(address(row), query, dim)
            elif scratch.queries.itemsize == 2:
                round_row(address(row), query, dim // 16)
            else:
                copy_row(address(row), query, dim // 16)
        k = weights.num_heads * dim
        v = k + weights.num_kv_heads * dim
        for h in range(weights.num_kv_heads):
            rotate(qkv[k + h * dim : k + (h + 1) * dim], cosine, sine, row)
            write_key(row[:dim], keys[block, h], key_scales[block, h], offset)
            value = qkv[v + h * dim : v + (h + 1) * dim]
            write_value(value, values[block, h], value_scales[block, h], offset, batch.cleared[m])


@inner
def attend_groups(thread, tiles, weights, i, cache, batch, scratch):
    """Attention of layer i. A function of its own that walks call by its address: another process can compile it."""
    keys, values, key_scales, value_scales = cache.keys[i], cache.values[i], cache.key_scales[i], cache.value_scales[i]
    dim, kv_heads, window = weights.head_dim, weights.num_kv_heads, weights.windows[i]
    per_token = weights.num_heads // kv_heads
    for item in shared_items(scratch.sync, thread, len(batch.groups) * kv_heads):
        first, count, sequence, length = batch.groups[item // kv_heads]
        h = item % kv_heads
        q, o = address(scratch.queries, h, first), address(scratch.attended, h, first)
        table, scores, factors = batch.tables[sequence], scratch.scores[thread], scratch.factors[thread]
        rows, q_bytes = count * per_token, scratch.queries.strides[1] // per_token
        alike = rows if weights.both_ways else per_token  # rows of the same context
        following = min(item + 1, len(batch.groups) * kv_heads - 1)
        _, next_count, next_sequence, next_length = batch.groups[following // kv_heads]
        next_last = next_length if weights.both_ways else next_length + next_count - 1
        before = max(0, next_length - window) // BLOCK if window else 0
        next_blocks = (next_last + BLOCK - 1) // BLOCK - before
        next_keys = address(keys) + following % kv_heads * keys.strides[1]
        attend(
            tiles, keys, values, key_scales, value_scales, h, rows, alike, length, table,
            q, q_bytes, o, dim, weights.score_scale, window, weights.score_cap, scores, factors,
            next_keys, batch.tables[next_sequence, before:], next_blocks,
        )  # fmt: skip


@merged
def gather_rows(thread, weights, layer, rows, is_last, sampled, scratch):
    """Attention's outputs, back from [kv_head][row], as the input of the o projection; in the last layer those of the
    sampled rows only, whose hidden state moves to scratch.last."""
    width = weights.head_dim * (weights.num_heads // weights.num_kv_heads)
    row = scratch.row[thread]
    for n in shared_items(scratch.sync, thread, rows):
        m = sampled[n] if is_last else n
        if is_last:
            copy_row(address(scratch.hidden, m), address(scratch.last, n), scratch.hidden.shape[1] // 16)
        for h in range(weights.num_kv_heads):
            copy_row(address(scratch.attended, h, m), address(row) + h * width * 4, width // 16)
        place = address(scratch.inputs) + n * input_stride(layer)
        prepare(layer, row[: layer[DEPTH]], np.int64(0), place, address(scratch.sums, n))


@inner
def gate_and_up(thread, tiles, weights, layer, rows, scratch):
    """Gate and up of a layer, which leave the input of down. Walks call it by its address, like attention."""
    by_amx = layer[GATE_UP, KIND] >= AMX_U4 and layer[DOWN, KIND] >= AMX_U4 and not layer[DOWN, MAGNITUDES]
    if by_amx and rows > AMX_ROWS:
        gate_up_pairs(tiles, thread, weights, layer, rows, scratch)
    else:
        gate_up_units(tiles, thread, weights, layer, rows, scratch)


@merged
def gate_up_units(tiles, thread, weights, layer, rows, scratch):
    """gate and up for some rows and channels at once, and their product as the input of the down projection."""
    gate_up, down, room = layer[GATE_UP], layer[DOWN], scratch.ffn[thread]
    stride, unpacked = room.strides[0], scratch.unpacked[thread]
    units, block = gate_up[COLUMN_COUNT] // (2 * UNIT), rows_at_once(rows, len(scratch.sync) // 2)
    size = (input_stride(down) - LINE) * UNIT // down[DEPTH]  # of a unit's inputs
    for item in shared_items(scratch.sync, thread, units * ((rows + block - 1) // block)):
        unit, first = item % units, item // units * block
        last, channels = min(first + block, rows), min(UNIT, weights.ffn_size - unit * UNIT)
        for t in range(2 * UNIT // COLUMNS):
            tile, c = unit * (2 * UNIT // COLUMNS) + t, address(room) + t * COLUMNS * 4
            linear_tile(tiles, gate_up, tile, first, last, scratch.inputs, scratch.sums, c, stride, unpacked)
        for m in range(first, last):
            row = room[m - first]
            if weights.gelu:
                geglu_row(address(row), address(row) + 4 * UNIT, address(row), channels // 16)
            else:
                swiglu_row(address(row), address(row) + 4 * UNIT, address(row), channels // 16)
            place = address(scratch.ffn_inputs) + m * input_stride(down)
            fetch(place + ROWS * input_stride(down) + unit * size, size // LINE)
            prepare(down, row[:channels], unit * UNIT, place, address(scratch.ffn_sums, m))


@merged
def gate_up_pairs(tiles, thread, weights, layer, rows, scratch):
    """The same by AMX, to the bit, a tile of gate and its tile of up at once: faster where there are so many rows that
    some can be multiplied while what comes of others is computed. The last tile may write zeros between the rows."""
    gate_up, down = layer[GATE_UP], layer[DOWN]
    room, unpacked, stride = address(scratch.ffn, thread), address(scratch.unpacked, thread), input_stride(down)
    across, block = (weights.ffn_size + COLUMNS - 1) // COLUMNS, rows_at_once(rows, len(scratch.sync) // 2)
    each = UNIT // COLUMNS  # tiles of gate, then as many of up
    for item in shared_items(scratch.sync, thread, across * ((rows + block - 1) // block)):
        pair, first = item % across, item // across * block
        gate, count = pair // each * 2 * each + pair % each, min(block, rows - first)
        a = address(scratch.inputs) + first * input_stride(gate_up)
        target = address(scratch.ffn_inputs) + first * stride + pair * COLUMNS * 2
        gated_by_amx(tiles, gate_up, down, gate, gate + each, count, a, room, unpacked, target, stride)


@merged
def head_tiles(tiles, thread, weights, rows, scratch):
    """The logits, and each row's largest of every tile while these are still in this core's caches."""
    layer, cap = weights.head, weights.logit_cap
    across, block = layer[COLUMN_COUNT] // COLUMNS, rows_at_once(rows, len(scratch.sync) // 2)
    ldc, ldtops = scratch.logits.strides[0], scratch.tops.strides[0]
    unpacked = scratch.unpacked[thread]
    for item in shared_items(scratch.sync, thread, across * ((rows + block - 1) // block)):
        tile, first = item % across, item // across * block
        last, c = min(first + block, rows), address(scratch.logits) + first * ldc + tile * COLUMNS * 4
        linear_tile(tiles, layer, tile, first, last, scratch.inputs, scratch.sums, c, ldc, unpacked)
        if cap:
            for m in range(last - first):
                cap_row(c + m * ldc, np.float32(1.0), cap, COLUMNS // 16)
        note_tops(last - first, c, ldc, address(scratch.tops) + first * ldtops + tile * 4, ldtops)
