"""The forward pass of the Llama architecture, as one compiled call.

A step walks the layers in phases; in each phase the threads share out rows, tiles or heads, then wait for all:
embed | norm | q k v | rotate, write K/V | attend | gather | o | norm | gate up | swiglu | down | ... | norm | head
"""

from numba import njit, prange, typeof, types

from millpond.kernels.attention import BLOCK, attend
from millpond.kernels.embedding import embed
from millpond.kernels.link import call, entry_point
from millpond.kernels.matmul import input_stride, linear
from millpond.kernels.pointwise import (
    copy_row,
    prepare,
    rms_norm,
    rotate,
    round_row,
    swiglu_row,
    write_key,
    write_value,
)
from millpond.kernels.simd import address
from millpond.kernels.threads import shared_items, start_phases

QKV, OUT, GATE_UP, DOWN = range(4)
PHASES_PER_LAYER = 10
PHASES_AROUND = 3  # embedding; the last norm; the head


# For functions that only compiled code calls: without a way in from Python they compile in half the time.
inner = njit(cache=True, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@njit(cache=True, nogil=True, parallel=True)
def forward(entry, tiles, weights, cache, batch, scratch):
    """Run one step: writes the rows' K/V into the cache and the sampled rows' logits into scratch.logits.

    entry: the address of `walk`, from `link_forward`.
    """
    start_phases(scratch.sync)
    for thread in prange(tiles.threads):
        call(entry, thread, tiles, weights, cache, batch, scratch)


def link_forward(tiles, weights, cache, batch, scratch):
    """Compile (or load) `walk` for these arguments' types; returns its address."""
    return entry_point(walk, types.int64, *(typeof(each) for each in (tiles, weights, cache, batch, scratch)))


@inner
def walk(thread, tiles, weights, cache, batch, scratch):
    """One thread's part of a step. Each call is a phase and returns when all of the phase's work is done."""
    sync, rows, unpacked = scratch.sync, batch.tokens.size, scratch.unpacked[thread]
    inputs, sums = scratch.inputs, scratch.sums
    embed_rows(0, weights, batch, scratch)
    for i in range(weights.layers.shape[0]):
        layer, keys, values = weights.layers[i], cache.keys[i], cache.values[i]
        phase = 1 + PHASES_PER_LAYER * i
        norm_rows(thread, phase, weights.norms[2 * i], weights.epsilon, layer[QKV], rows, scratch)
        linear(tiles, sync, phase + 1, layer[QKV], rows, inputs, sums, scratch.qkv, unpacked)
        rotate_rows(thread, phase + 2, weights, keys, values, batch, scratch)
        attend_groups(tiles, thread, phase + 3, weights, keys, values, batch, scratch)
        gather_rows(thread, phase + 4, weights, layer[OUT], rows, scratch)
        linear(tiles, sync, phase + 5, layer[OUT], rows, inputs, sums, scratch.hidden, unpacked)
        norm_rows(thread, phase + 6, weights.norms[2 * i + 1], weights.epsilon, layer[GATE_UP], rows, scratch)
        linear(tiles, sync, phase + 7, layer[GATE_UP], rows, inputs, sums, scratch.gate_up, unpacked)
        swiglu_rows(thread, phase + 8, weights.ffn_size, layer[DOWN], rows, scratch)
        linear(tiles, sync, phase + 9, layer[DOWN], rows, inputs, sums, scratch.hidden, unpacked)
    phase = 1 + PHASES_PER_LAYER * weights.layers.shape[0]
    norm_sampled(thread, phase, weights, batch.sampled, scratch)
    sampled = batch.sampled.size
    linear(tiles, sync, phase + 1, weights.head, sampled, inputs, sums, scratch.logits, unpacked)


@inner
def embed_rows(phase, weights, batch, scratch):
    for m in shared_items(scratch.sync, phase, batch.tokens.size, len(scratch.row)):
        embed(weights.embedding, batch.tokens[m], scratch.hidden[m])


@inner
def norm_row(thread, source, target, gain, epsilon, layer, scratch):
    """Row `target` of a linear layer's input = the norm of row `source` of the hidden state."""
    row = scratch.row[thread]
    rms_norm(scratch.hidden[source], gain, epsilon, row)
    prepare(layer, row, address(scratch.inputs) + target * input_stride(layer), address(scratch.sums[target]))


@inner
def norm_rows(thread, phase, gain, epsilon, layer, rows, scratch):
    for m in shared_items(scratch.sync, phase, rows, len(scratch.row)):
        norm_row(thread, m, m, gain, epsilon, layer, scratch)


@inner
def norm_sampled(thread, phase, weights, sampled, scratch):
    for n in shared_items(scratch.sync, phase, sampled.size, len(scratch.row)):
        norm_row(thread, sampled[n], n, weights.norms[-1], weights.epsilon, weights.head, scratch)


@inner
def rotate_rows(thread, phase, weights, keys, values, batch, scratch):
    """Rotate queries and keys; queries go to [kv_head][row][head of the group], keys and values into their block."""
    dim, per_kv = weights.head_dim, weights.num_heads // weights.num_kv_heads
    row = scratch.row[thread]
    for m in shared_items(scratch.sync, phase, batch.tokens.size, len(scratch.row)):
        qkv, block, offset = scratch.qkv[m], batch.places[m] // BLOCK, batch.places[m] % BLOCK
        cosine, sine = weights.cosine[batch.positions[m]], weights.sine[batch.positions[m]]
        for h in range(weights.num_heads):
            rotate(qkv[h * dim : (h + 1) * dim], cosine, sine, row)
            query = address(scratch.queries[h // per_kv, m]) + h % per_kv * dim * scratch.queries.itemsize
            if scratch.queries.itemsize == 2:
                round_row(address(row), query, dim // 16)
            else:
                copy_row(address(row), query, dim // 16)
        k = weights.num_heads * dim
        v = k + weights.num_kv_heads * dim
        for h in range(weights.num_kv_heads):
            rotate(qkv[k + h * dim : k + (h + 1) * dim], cosine, sine, row)
            write_key(row, keys[block, h], offset)
            write_value(qkv[v + h * dim : v + (h + 1) * dim], values[block, h], offset, batch.cleared[m])


@inner
def attend_groups(tiles, thread, phase, weights, keys, values, batch, scratch):
    dim, kv_heads = weights.head_dim, weights.num_kv_heads
    per_token = weights.num_heads // kv_heads
    for item in shared_items(scratch.sync, phase, len(batch.groups) * kv_heads, tiles.threads):
        first, count, sequence, length = batch.groups[item // kv_heads]
        h = item % kv_heads
        q, o = address(scratch.queries[h, first]), address(scratch.attended[h, first])
        table, scores, factors = batch.tables[sequence], scratch.scores[thread], scratch.factors[thread]
        attend(tiles, keys, values, h, count * per_token, per_token, length, table, q, o, dim, scores, factors)


@inner
def gather_rows(thread, phase, weights, layer, rows, scratch):
    """Attention's outputs, back from [kv_head][row], as the input of the o projection."""
    width = weights.head_dim * (weights.num_heads // weights.num_kv_heads)
    row = scratch.row[thread]
    for m in shared_items(scratch.sync, phase, rows, len(scratch.row)):
        for h in range(weights.num_kv_heads):
            copy_row(address(scratch.attended[h, m]), address(row) + h * width * 4, width // 16)
        prepare(layer, row, address(scratch.inputs) + m * input_stride(layer), address(scratch.sums[m]))


@inner
def swiglu_rows(thread, phase, ffn_size, layer, rows, scratch):
    row = scratch.row[thread]
    for m in shared_items(scratch.sync, phase, rows, len(scratch.row)):
        gate = address(scratch.gate_up[m])
        swiglu_row(gate, gate + 4 * ffn_size, address(row), ffn_size // 16)
        prepare(layer, row, address(scratch.inputs) + m * input_stride(layer), address(scratch.sums[m]))
