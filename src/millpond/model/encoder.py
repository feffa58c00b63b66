"""The forward pass of encoders, whose prompts are whole in a step: every row sees all rows of its prompt.

embed, position | norm | q k v | place, write K/V | attend | gather | o | bias, norm | up, gelu | down | ... | norm
The norms are of the sums, and what the last of them gives stays in scratch.hidden for all rows. There is no head.
"""

import numpy as np

from millpond.kernels.embedding import embed
from millpond.kernels.jit import inner, inner_copy, merged
from millpond.kernels.link import call
from millpond.kernels.matmul import COLUMN_COUNT, COLUMNS, UNIT, input_stride, linear, linear_tile, rows_at_once
from millpond.kernels.pointwise import add_row, copy_row, gelu_row, layer_norm, prepare
from millpond.kernels.simd import address
from millpond.kernels.threads import shared_items
from millpond.model.config import ModelConfig
from millpond.model.forward import DOWN, GATE_UP, OUT, QKV, gather_rows, rotate_rows, walk

embed = inner_copy(embed, inline="always")
layer_norm, linear, prepare = (inner_copy(each) for each in (layer_norm, linear, prepare))


def walk_of(config: ModelConfig):
    """What a step of such a model does."""
    return walk_encoder if config.is_encoder else walk


@inner
def walk_encoder(thread, tiles, weights, cache, batch, scratch):
    """One thread's part of a step, as `walk` is for models that look back."""
    sync, rows, hidden, unpacked = scratch.sync, batch.tokens.size, scratch.hidden, scratch.unpacked[thread]
    inputs, sums, layers = scratch.inputs, scratch.sums, weights.layers
    embed_positions(thread, weights, batch, scratch)
    norm_sums(thread, weights, 0, layers[0][QKV], rows, scratch)
    for i in range(len(layers)):
        layer, keys, values = layers[i], cache.keys[i], cache.values[i]
        key_scales, value_scales = cache.key_scales[i], cache.value_scales[i]
        linear(tiles, sync, thread, layer[QKV], rows, inputs, sums, scratch.qkv, unpacked)
        rotate_rows(thread, weights, i, keys, values, key_scales, value_scales, batch, scratch)
        call(weights.attention, thread, tiles, weights, i, cache, batch, scratch)
        gather_rows(thread, weights, layer[OUT], rows, False, batch.sampled, scratch)
        linear(tiles, sync, thread, layer[OUT], rows, inputs, sums, hidden, unpacked)
        norm_sums(thread, weights, 2 * i + 1, layer[GATE_UP], rows, scratch)
        up_units(tiles, thread, weights, i, layer, rows, scratch)
        linear(tiles, sync, thread, layer[DOWN], rows, scratch.ffn_inputs, scratch.ffn_sums, hidden, unpacked)
        norm_sums(thread, weights, 2 * i + 2, layers[min(i + 1, len(layers) - 1)][QKV], rows, scratch)


@merged
def embed_positions(thread, weights, batch, scratch):
    for m in shared_items(scratch.sync, thread, batch.tokens.size):
        embed(weights.embedding, batch.tokens[m], scratch.hidden[m])
        place = weights.positions[batch.positions[m]]
        add_row(address(place), address(scratch.hidden, m), place.size // 16)


@inner
def norm_sums(thread, weights, n, layer, rows, scratch):
    """The hidden rows, plus the bias of what was added to them, through norm n: in place, and, but for the last norm,
    as the input of a linear layer."""
    row, size = scratch.row[thread], weights.norms.shape[1]
    for m in shared_items(scratch.sync, thread, rows):
        hidden = scratch.hidden[m]
        add_row(address(weights.sum_biases, n), address(hidden), size // 16)
        layer_norm(hidden, weights.norms[n], weights.norm_biases[n], weights.epsilon, hidden)
        if n + 1 < len(weights.norms):
            copy_row(address(hidden), address(row), size // 16)
            place = address(scratch.inputs) + m * input_stride(layer)
            prepare(layer, row[:size], np.int64(0), place, address(scratch.sums, m))


@merged
def up_units(tiles, thread, weights, i, layer, rows, scratch):
    """The FFN's first layer for some rows and channels at once, through its activation, as the input of the second."""
    up, down, room = layer[GATE_UP], layer[DOWN], scratch.ffn[thread]
    stride, unpacked = room.strides[0], scratch.unpacked[thread]
    units, block = up[COLUMN_COUNT] // UNIT, rows_at_once(rows, len(scratch.sync) // 2)
    for item in shared_items(scratch.sync, thread, units * ((rows + block - 1) // block)):
        unit, first = item % units, item // units * block
        last, channels = min(first + block, rows), min(UNIT, weights.ffn_size - unit * UNIT)
        for t in range(UNIT // COLUMNS):
            tile, c = unit * (UNIT // COLUMNS) + t, address(room) + t * COLUMNS * 4
            linear_tile(tiles, up, tile, first, last, scratch.inputs, scratch.sums, c, stride, unpacked)
        for m in range(first, last):
            row = room[m - first]
            add_row(address(weights.up_biases, i, unit * UNIT), address(row), channels // 16)
            gelu_row(address(row), address(row), channels // 16)
            place = address(scratch.ffn_inputs) + m * input_stride(down)
            prepare(down, row[:channels], unit * UNIT, place, address(scratch.ffn_sums, m))
