"""A mixture of experts in place of the FFN, as a function of its own that `walk` calls by its address.

A router scores all experts for a row; the row goes through the best of them, and their outputs are summed by their
shares. Rows are put side by side by expert, in slots, so that each expert's weights are read once for several:
route | choose | sort | gather | gate * up | down | sum
"""

import numpy as np
from numba import types

from millpond.kernels.jit import inner, inner_copy
from millpond.kernels.link import entry_point
from millpond.kernels.matmul import COLUMN_COUNT, COLUMNS, ROW_BLOCK, UNIT, input_stride, linear, linear_tile
from millpond.kernels.pointwise import copy_row, prepare, swiglu_row
from millpond.kernels.reference import reference_to
from millpond.kernels.simd import address
from millpond.kernels.threads import shared_items
from millpond.model.forward import gate_and_up

# Of a layer's descriptors; gate and up, and down, of expert e are 2 e behind the first's.
ROUTER, FIRST_GATE_UP, FIRST_DOWN = 2, 3, 4
# scratch.slots [lists, slots]: where each expert's slots start, the row of each slot, its expert, and the slot of each
# choice (row * used + which). scratch.routed: a row's scores of all experts, then its shares of the chosen ones.
STARTS, ROW_OF, EXPERT_OF, SLOT_OF = range(4)
NUM_SLOT_LISTS = 4

linear, prepare = inner_copy(linear), inner_copy(prepare)


@inner
def experts(thread, tiles, weights, layer, rows, scratch):
    """The FFN of a layer for rows that are prepared for its router; what it gives goes to scratch.branch."""
    sync, unpacked = scratch.sync, scratch.unpacked[thread]
    linear(tiles, sync, thread, layer[ROUTER], rows, scratch.inputs, scratch.sums, scratch.routed, unpacked)
    choose_rows(thread, weights, rows, scratch)
    for _ in shared_items(sync, thread, 1):
        sort_slots(weights, rows, scratch.slots)
    gather_slots(thread, weights, layer, rows, scratch)
    gate_up_slots(tiles, thread, weights, layer, scratch)
    down_slots(tiles, thread, weights, layer, scratch)
    sum_rows(thread, weights, layer, rows, scratch)


def link_ffn(tiles, weights, scratch, link=entry_point):
    """Compile (or load) `experts`, or where there are none `gate_and_up`, for these arguments' types; returns its
    address, for weights.ffn. link does it, as in load_tiles."""
    kinds = reference_to(tiles), reference_to(weights), types.Array(types.int64, 2, "C")
    return link(
        experts if weights.num_experts else gate_and_up, types.int64, *kinds, types.int64, reference_to(scratch)
    )


@inner
def choose_rows(thread, weights, rows, scratch):
    """Each row's experts with the largest scores, in that order (of equals the first), and their shares."""
    count, used = weights.num_experts, weights.experts_used
    for m in shared_items(scratch.sync, thread, rows):
        scores, chosen = scratch.routed[m], scratch.slots[SLOT_OF, m * used : (m + 1) * used]
        shares = scores[scores.size - used :]
        for k in range(used):
            best = -1
            for e in range(count):
                is_taken = False
                for before in range(k):
                    is_taken |= chosen[before] == e
                if not is_taken and (best < 0 or scores[e] > scores[best]):
                    best = e
            chosen[k] = best
        peak, total = scores[chosen[0]], np.float32(0)
        for e in range(count):
            total += np.exp(scores[e] - peak)
        if weights.normalise_experts:
            total = np.float32(0)
            for k in range(used):
                total += np.exp(scores[chosen[k]] - peak)
        for k in range(used):
            shares[k] = np.exp(scores[chosen[k]] - peak) / total


@inner
def sort_slots(weights, rows, slots):
    """From each choice's expert to its slot: those of an expert side by side, in the order of the rows."""
    starts, used, count = slots[STARTS], weights.experts_used, weights.num_experts
    starts[: count + 1] = 0
    for choice in range(rows * used):
        starts[slots[SLOT_OF, choice] + 1] += 1
    for e in range(count):
        starts[e + 1] += starts[e]
    for choice in range(rows * used):
        e = slots[SLOT_OF, choice]
        slot = starts[e]
        starts[e] += 1
        slots[SLOT_OF, choice], slots[ROW_OF, slot], slots[EXPERT_OF, slot] = slot, choice // used, e
    for e in range(count, 0, -1):  # each start has moved to its expert's end, the next one's start
        starts[e] = starts[e - 1]
    starts[0] = 0


@inner
def gather_slots(thread, weights, layer, rows, scratch):
    """The row of each slot, which the router's input holds in float32, as the input of its expert."""
    row, size = scratch.row[thread], weights.norms.shape[1]
    stride = 4 * size + 64
    for slot in shared_items(scratch.sync, thread, rows * weights.experts_used):
        e, m = scratch.slots[EXPERT_OF, slot], scratch.slots[ROW_OF, slot]
        first, gate_up = scratch.slots[STARTS, e], layer[FIRST_GATE_UP + 2 * e]
        copy_row(address(scratch.inputs) + m * input_stride(layer[ROUTER]), address(row), size // 16)
        # an expert's rows are together whatever the kind of the others
        place = address(scratch.expert_inputs) + first * stride + (slot - first) * input_stride(gate_up)
        prepare(gate_up, row[:size], np.int64(0), place, address(scratch.expert_sums, slot))


@inner
def gate_up_slots(tiles, thread, weights, layer, scratch):
    """gate and up for the slots of one expert and some channels at once, and their product as the input of down."""
    room, unpacked = scratch.ffn[thread], scratch.unpacked[thread]
    units, stride = layer[FIRST_GATE_UP, COLUMN_COUNT] // (2 * UNIT), 4 * weights.norms.shape[1] + 64
    ffn_stride = 4 * weights.ffn_size + 64
    for item in shared_items(scratch.sync, thread, units * weights.num_experts):
        e, unit = item // units, item % units
        start, stop = scratch.slots[STARTS, e], scratch.slots[STARTS, e + 1]
        gate_up, down, channels = (
            layer[FIRST_GATE_UP + 2 * e],
            layer[FIRST_DOWN + 2 * e],
            min(UNIT, weights.ffn_size - unit * UNIT),
        )
        inputs, sums = scratch.expert_inputs[start * stride :], scratch.expert_sums[start:]
        for first in range(0, stop - start, ROW_BLOCK):
            last = min(first + ROW_BLOCK, stop - start)
            for t in range(2 * UNIT // COLUMNS):
                tile, c = unit * (2 * UNIT // COLUMNS) + t, address(room) + t * COLUMNS * 4
                linear_tile(tiles, gate_up, tile, first, last, inputs, sums, c, room.strides[0], unpacked)
            for n in range(first, last):
                row = room[n - first]
                swiglu_row(address(row), address(row) + 4 * UNIT, address(row), channels // 16)
                place = address(scratch.ffn_inputs) + start * ffn_stride + n * input_stride(down)
                prepare(down, row[:channels], unit * UNIT, place, address(scratch.ffn_sums, start + n))


@inner
def down_slots(tiles, thread, weights, layer, scratch):
    unpacked, outputs = scratch.unpacked[thread], scratch.expert_outputs
    across, stride, ldc = layer[FIRST_DOWN, COLUMN_COUNT] // COLUMNS, 4 * weights.ffn_size + 64, outputs.strides[0]
    for item in shared_items(scratch.sync, thread, across * weights.num_experts):
        e, tile = item // across, item % across
        start, stop = scratch.slots[STARTS, e], scratch.slots[STARTS, e + 1]
        inputs, sums = scratch.ffn_inputs[start * stride :], scratch.ffn_sums[start:]
        for first in range(0, stop - start, ROW_BLOCK):
            last, c = (
                min(first + ROW_BLOCK, stop - start),
                address(outputs) + (start + first) * ldc + tile * COLUMNS * 4,
            )
            linear_tile(tiles, layer[FIRST_DOWN + 2 * e], tile, first, last, inputs, sums, c, ldc, unpacked)


@inner
def sum_rows(thread, weights, layer, rows, scratch):
    """What a row's experts gave, by their shares, in the order in which they were chosen."""
    used, size = weights.experts_used, scratch.branch.shape[1]
    for m in shared_items(scratch.sync, thread, rows):
        target, shares = scratch.branch[m], scratch.routed[m, scratch.routed.shape[1] - used :]
        target[:] = 0
        for k in range(used):
            given, share = scratch.expert_outputs[scratch.slots[SLOT_OF, m * used + k]], shares[k]
            for i in range(size):
                target[i] += share * given[i]
