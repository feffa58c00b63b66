"""The forward pass of the Llama architecture, as one compiled call.

A step walks the layers in phases; in each phase the threads share out rows, tiles or heads, then wait for all:
embed | norm | q k v | rotate, write K/V | attend | prepare | o | norm | gate up | swiglu | down | ... | norm | head
"""

from numba import njit, prange, typeof, types

from millpond.kernels.attention import BLOCK, attend
from millpond.kernels.embedding import embed
from millpond.kernels.link import call, entry_point
from millpond.kernels.matmul import linear
from millpond.kernels.pointwise import (
    copy_row,
    prepare,
    put_query,
    rms_norm,
    rotate,
    swiglu_row,
    write_key,
    write_value,
)
from millpond.kernels.simd import address
from millpond.kernels.threads import start_phases, take, wait_for_all

QKV, OUT, GATE_UP, DOWN = range(4)


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


@njit(cache=True, nogil=True)
def walk(thread, tiles, weights, cache, batch, scratch):
    """One thread's part of a step."""
    sync, rows, phase = scratch.sync, batch.tokens.size, 1
    unpacked = scratch.unpacked[thread]
    embed_rows(phase, weights, batch, scratch)
    wait_for_all(sync, phase, tiles.threads)
    for i in range(weights.layers.shape[0]):
        layer, keys, values = weights.layers[i], cache.keys[i], cache.values[i]
        phase += 1
        norm_rows(thread, phase, weights.norms[2 * i], weights.epsilon, layer[QKV], rows, scratch)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        linear(tiles, sync, phase, layer[QKV], rows, scratch.inputs, scratch.sums, scratch.qkv, 0, unpacked)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        rotate_rows(thread, phase, weights, keys, values, batch, scratch)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        attend_groups(tiles, thread, phase, weights, keys, values, batch, scratch)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        gather_rows(thread, phase, weights, layer[OUT], rows, scratch)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        linear(tiles, sync, phase, layer[OUT], rows, scratch.inputs, scratch.sums, scratch.hidden, 1, unpacked)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        norm_rows(thread, phase, weights.norms[2 * i + 1], weights.epsilon, layer[GATE_UP], rows, scratch)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        linear(tiles, sync, phase, layer[GATE_UP], rows, scratch.inputs, scratch.sums, scratch.gate_up, 0, unpacked)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        swiglu_rows(thread, phase, weights.ffn_size, layer[DOWN], rows, scratch)
        wait_for_all(sync, phase, tiles.threads)
        phase += 1
        linear(tiles, sync, phase, layer[DOWN], rows, scratch.inputs, scratch.sums, scratch.hidden, 1, unpacked)
        wait_for_all(sync, phase, tiles.threads)
    phase += 1
    norm_sampled(thread, phase, weights, batch.sampled, scratch)
    wait_for_all(sync, phase, tiles.threads)
    phase += 1
    if batch.sampled.size:
        linear(
            tiles,
            sync,
            phase,
            weights.head,
            batch.sampled.size,
            scratch.inputs,
            scratch.sums,
            scratch.logits,
            0,
            unpacked,
        )


@njit(cache=True, nogil=True)
def embed_rows(phase, weights, batch, scratch):
    m = take(scratch.sync, phase, 1)
    while m < batch.tokens.size:
        embed(weights.embedding, batch.tokens[m], scratch.hidden[m])
        m = take(scratch.sync, phase, 1)


@njit(cache=True, nogil=True)
def norm_row(thread, source, target, gain, epsilon, layer, scratch):
    """Row `target` of a linear layer's input = the norm of row `source` of the hidden state."""
    row = scratch.row[thread]
    rms_norm(scratch.hidden[source], gain, epsilon, row)
    prepare(layer, row, address(scratch.inputs[target]), address(scratch.sums[target]))


@njit(cache=True, nogil=True)
def norm_rows(thread, phase, gain, epsilon, layer, rows, scratch):
    m = take(scratch.sync, phase, 1)
    while m < rows:
        norm_row(thread, m, m, gain, epsilon, layer, scratch)
        m = take(scratch.sync, phase, 1)


@njit(cache=True, nogil=True)
def norm_sampled(thread, phase, weights, sampled, scratch):
    n = take(scratch.sync, phase, 1)
    while n < sampled.size:
        norm_row(thread, sampled[n], n, weights.norms[-1], weights.epsilon, weights.head, scratch)
        n = take(scratch.sync, phase, 1)


@njit(cache=True, nogil=True)
def rotate_rows(thread, phase, weights, keys, values, batch, scratch):
    """Rotate queries and keys; queries go to [kv_head][row][head of the group], keys and values into their block."""
    dim, per_kv = weights.head_dim, weights.num_heads // weights.num_kv_heads
    row = scratch.row[thread]
    m = take(scratch.sync, phase, 1)
    while m < batch.tokens.size:
        qkv, block, offset = scratch.qkv[m], batch.places[m] // BLOCK, batch.places[m] % BLOCK
        cosine, sine = weights.cosine[batch.positions[m]], weights.sine[batch.positions[m]]
        for h in range(weights.num_heads):
            rotate(qkv[h * dim : (h + 1) * dim], cosine, sine, row)
            queries = scratch.queries[h // per_kv, m]
            put_query(address(row), queries[h % per_kv * dim : (h % per_kv + 1) * dim], dim // 16)
        k = weights.num_heads * dim
        v = k + weights.num_kv_heads * dim
        for h in range(weights.num_kv_heads):
            rotate(qkv[k + h * dim : k + (h + 1) * dim], cosine, sine, row)
            write_key(row, keys[block, h], offset)
            write_value(qkv[v + h * dim : v + (h + 1) * dim], values[block, h], offset, batch.cleared[m])
        m = take(scratch.sync, phase, 1)


@njit(cache=True, nogil=True)
def attend_groups(tiles, thread, phase, weights, keys, values, batch, scratch):
    dim, kv_heads = weights.head_dim, weights.num_kv_heads
    per_token = weights.num_heads // kv_heads
    item = take(scratch.sync, phase, 1)
    while item < batch.groups.shape[0] * kv_heads:
        first, count, sequence, length = batch.groups[item // kv_heads]
        h = item % kv_heads
        q, o = address(scratch.queries[h, first]), address(scratch.attended[h, first])
        table, scores, factors = batch.tables[sequence], scratch.scores[thread], scratch.factors[thread]
        attend(tiles, keys, values, h, count * per_token, per_token, length, table, q, o, dim, scores, factors)
        item = take(scratch.sync, phase, 1)


@njit(cache=True, nogil=True)
def gather_rows(thread, phase, weights, layer, rows, scratch):
    """Attention's outputs, back from [kv_head][row], as the input of the o projection."""
    width = weights.head_dim * (weights.num_heads // weights.num_kv_heads)
    row = scratch.row[thread]
    m = take(scratch.sync, phase, 1)
    while m < rows:
        for h in range(weights.num_kv_heads):
            copy_row(address(scratch.attended[h, m]), address(row) + h * width * 4, width // 16)
        prepare(layer, row, address(scratch.inputs[m]), address(scratch.sums[m]))
        m = take(scratch.sync, phase, 1)


@njit(cache=True, nogil=True)
def swiglu_rows(thread, phase, ffn_size, layer, rows, scratch):
    row = scratch.row[thread]
    m = take(scratch.sync, phase, 1)
    while m < rows:
        gate = address(scratch.gate_up[m])
        swiglu_row(gate, gate + 4 * ffn_size, address(row), ffn_size // 16)
        prepare(layer, row, address(scratch.inputs[m]), address(scratch.sums[m]))
        m = take(scratch.sync, phase, 1)
