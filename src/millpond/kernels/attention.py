"""Paged attention: each query row against the blocks of its sequence, in block order, whatever the batch.

For each row: scores over all its blocks, a softmax over its context, then the weighted sum of the values.
"""

from functools import partial, reduce

import numpy as np
from llvmlite.ir import Constant
from numba import types
from numba.extending import intrinsic

from millpond.kernels.attention_int8 import BLOCK, DIMS, put_probabilities, score_dims, value_block
from millpond.kernels.isa import AVX512, PORTABLE
from millpond.kernels.jit import compiled, inner
from millpond.kernels.link import call
from millpond.kernels.matmul import AMX_ROWS
from millpond.kernels.pointwise import cap_row
from millpond.kernels.simd import F32, I1, I32, I64, LOG2_E, V16F32, V16I32, Ir, address, put_float, vector

# A block holds 16 positions. Its keys and values are laid out for the tiles, per K/V head:
#
#     bfloat16   keys [head_dim/2][16][2]: pairs of dimensions, positions along the vector
#                values [8][head_dim][2]: pairs of positions, dimensions along the vector
#     float32    keys [head_dim][16], values [16][head_dim]
#
# and for 8 bits see attention_int8.py.
F32_KV, BF16_KV, INT8_KV = range(3)
KV_KINDS = {np.float32: F32_KV, np.uint16: BF16_KV, np.uint8: INT8_KV}  # by the type of the arrays that hold it
TILE_ROWS = 6
FEW_ROWS = 16  # so many and fewer would wait for memory: what comes next is asked for before it is needed
AHEAD_BLOCKS = 2  # where rows are more, keys and values are asked for so far ahead
EVERYWHERE = 2**30  # a window without an end
GROUP_TOKENS = 16  # consecutive tokens of one sequence that attend together and share each K/V load


class Counterpart:
    """Asks for the line of another block (0: of none) that lies there as a line does in its own."""

    def __init__(self, ir, block, other):
        self.ir, self.wanted = ir, ir.b.icmp_signed("!=", other, I64(0))
        self.distance = ir.b.sub(other, block)

    def ask(self, line):
        with self.ir.b.if_then(self.wanted):
            self.ir.prefetch(self.ir.at(line, self.distance), near=2)


@intrinsic(prefer_literal=True)
def score_tile(typingctx, isa, kv, rows, q, ldq, k, k_scales, scores, ldscores, head_dim, next_k):
    """scores[0:rows, 0:16] = q @ k for one block. q: rows as kv, the kind of cache, wants them; k_scales: of an
    8-bit cache; next_k: a block whose lines are asked for while those of k are loaded, or 0."""
    isa_, kv_, rows_ = isa.literal_value, kv.literal_value, rows.literal_value
    bf16_ = kv_ == BF16_KV

    def codegen(context, builder, signature, args):
        ir = Ir(builder, isa_)
        q, ldq, k, k_scales, scores, lds, head_dim, next_k = args[3:]
        coming = Counterpart(ir, k, next_k)
        steps, size = 8, ir.together(rows_, 3)
        dims = {F32_KV: steps, BF16_KV: 2 * steps, INT8_KV: DIMS}[kv_]
        count = builder.sdiv(head_dim, I64(dims))

        def some_dims(q_row, i, acc):
            acc = [list(acc[: len(q_row)]), list(acc[len(q_row) :])]  # two chains hide the latency
            for d in range(steps):
                at = ir.at(k, ir.times(i, 64 * steps), 64 * d)
                key = ir.load(V16I32 if bf16_ else V16F32, at)
                coming.ask(at)
                for r, q_r in enumerate(q_row):
                    query = ir.load_splat(I32 if bf16_ else F32, ir.at(q_r, ir.times(i, 4 * steps)), 4 * d)
                    chain = acc[d % 2]
                    chain[r] = ir.dot_bf16(chain[r], key, query) if bf16_ else ir.fma(key, query, chain[r])
            return acc[0] + acc[1]

        def totals(q_row):
            if kv_ == INT8_KV:
                return ir.loop(count, [ir.zero()] * size, partial(score_dims, ir, coming, k, k_scales, head_dim, q_row))
            acc = ir.loop(count, [ir.zero()] * (2 * size), partial(some_dims, q_row))
            return map(builder.fadd, acc[:size], acc[size:])

        def some_rows(i, _):
            row = [ir.at(ir.times(i, size), r) for r in range(size)]
            for r, total in zip(row, totals([ir.at(q, builder.mul(ldq, r)) for r in row]), strict=True):
                ir.store(total, ir.at(scores, builder.mul(lds, r)))
            return []

        ir.loop(I64(rows_ // size), [], some_rows)
        return context.get_dummy_value()

    return types.void(isa, kv, rows, *[types.int64] * 8), codegen


def _block_at(ir, base, block_bytes, table, i):
    """The address of a sequence's i-th block."""
    return ir.at(base, ir.b.mul(ir.load(I64, ir.at(table, ir.times(i, 8))), block_bytes))


@intrinsic(prefer_literal=True)
def softmax_row(typingctx, isa, kv, windowed, scale, start, scores, length, blocks, table, v_scales, block_bytes):
    """exp(scale * (scores[i] - max)) for i < length, 0 from there to 16 * blocks, written over the scores; returns
    1 / sum. With windowed 1 also 0 for i < start.

    What is written has the cache's type; a bfloat16 row takes the first half of the room of its scores. v_scales:
    of an 8-bit cache, block_bytes from one block to the next.
    """
    isa_, kv_, windowed_ = isa.literal_value, kv.literal_value, windowed.literal_value

    def codegen(context, builder, signature, args):
        ir, to_bf16 = Ir(builder), Ir(builder, isa_ if isa_ == AVX512 else PORTABLE).to_bf16
        scale, start, scores, length, blocks, table, v_scales, block_bytes = args[3:]
        lanes = Constant(V16I32, list(range(16)))
        own_blocks = builder.sdiv(builder.add(length, I64(BLOCK - 1)), I64(BLOCK))
        whole = I64(0) if windowed_ else builder.sdiv(length, I64(BLOCK))  # blocks that are looked at without a mask
        nowhere, lowest = ir.const(vector(I1), 0), ir.const(V16F32, -3.0e38)
        everywhere = ir.const(vector(I1), 1)

        def score(i):
            return ir.load(V16F32, ir.at(scores, ir.times(i, 64)))

        def inside(i):
            left = builder.trunc(builder.sub(length, ir.times(i, BLOCK)), I32)
            result = builder.icmp_signed("<", lanes, ir.splat(left))
            if windowed_:
                before = builder.trunc(builder.sub(start, ir.times(i, BLOCK)), I32)
                result = builder.and_(result, builder.icmp_signed(">=", lanes, ir.splat(before)))
            return result

        def four_larger(i, acc):
            return [ir.select_max(score(ir.at(ir.times(i, 4), j)), peak) for j, peak in enumerate(acc)]

        def larger(i, acc):
            i = builder.add(whole, i)
            return [ir.select_max(builder.select(inside(i), score(i), lowest), acc[0])]

        peaks = ir.loop(builder.ashr(whole, I64(2)), [lowest] * 4, four_larger)
        rest = builder.and_(whole, I64(3))
        first = builder.sub(whole, rest)
        peaks[:1] = ir.loop(rest, peaks[:1], lambda i, acc: [ir.select_max(score(builder.add(first, i)), acc[0])])
        peaks[:1] = ir.loop(builder.sub(own_blocks, whole), peaks[:1], larger)
        peak = ir.reduce(ir.select_max, reduce(ir.select_max, peaks))
        factor = builder.fmul(scale, F32(LOG2_E))
        factor, peak = ir.splat(factor), ir.splat(builder.fneg(builder.fmul(peak, factor)))

        def put(i, value, inside):
            if kv_ == INT8_KV:
                put_probabilities(ir, scores, _block_at(ir, v_scales, block_bytes, table, i), i, value, inside)
            elif kv_ == BF16_KV:
                ir.store(to_bf16(value), ir.at(scores, ir.times(i, 32)))
            else:
                ir.store(value, ir.at(scores, ir.times(i, 64)))

        def exponential(i):
            return ir.exp2(ir.fma(score(i), factor, peak))

        def whole_block(i, acc):
            value = exponential(i)
            put(i, value, everywhere)
            return [builder.fadd(acc[0], value)]

        def part_of_block(i, acc):
            i = builder.add(whole, i)
            value = builder.select(inside(i), exponential(i), ir.zero())
            put(i, value, inside(i))
            return [builder.fadd(acc[0], value)]

        (total,) = ir.loop(whole, [ir.zero()], whole_block)
        (total,) = ir.loop(builder.sub(own_blocks, whole), [total], part_of_block)
        total = ir.reduce(builder.fadd, total)
        rest = builder.sub(blocks, own_blocks)
        ir.loop(rest, [], lambda i, _: put(builder.add(own_blocks, i), ir.zero(), nowhere) or [])
        return builder.fdiv(F32(1.0), total)

    return types.float32(isa, kv, windowed, types.float32, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def value_tile(
    typingctx, isa, kv, rows, vectors, p, ldp, table, blocks, v, block_bytes, factors, o, ldo, head_dim,
    next_v, next_table, next_blocks,
):  # fmt: skip
    """o[r, 0:16 * vectors] = factors[r] * p[r] @ values over a sequence's blocks; table: int64 block numbers. next_v,
    next_table, next_blocks: the blocks of which lines are asked for while those of v are loaded, i-th with i-th."""
    isa_, kv_ = isa.literal_value, kv.literal_value
    rows_, vectors_, bf16_ = rows.literal_value, vectors.literal_value, kv_ == BF16_KV

    def codegen(context, builder, signature, args):
        ir = Ir(builder, isa_)
        p, ldp, table, blocks, v, block_bytes, factors, o, ldo, head_dim, next_v, next_table, next_blocks = args[4:]
        row_bytes, rows, vectors = ir.times(head_dim, 4), ir.together(rows_, 3), ir.together(vectors_, 1)

        def block(p_row, skipped, i, acc):
            acc, values = list(acc), ir.at(_block_at(ir, v, block_bytes, table, i), skipped)
            has_next = builder.icmp_signed("<", i, next_blocks)
            following = _block_at(ir, next_v, block_bytes, next_table, builder.select(has_next, i, I64(0)))
            coming = Counterpart(ir, values, builder.select(has_next, ir.at(following, skipped), I64(0)))
            if kv_ == INT8_KV:
                return value_block(ir, coming, vectors, p_row, values, i, acc)
            for step in range(BLOCK // 2 if bf16_ else BLOCK):
                row = ir.at(values, builder.mul(row_bytes, I64(step)))
                loaded = []
                for j in range(vectors):
                    loaded.append(ir.load(V16I32 if bf16_ else V16F32, row, 64 * j))
                    coming.ask(ir.at(row, 64 * j))
                for r in range(rows):
                    at = ir.at(p_row[r], ir.times(i, BLOCK * (2 if bf16_ else 4)))
                    weight = ir.load_splat(I32 if bf16_ else F32, at, 4 * step)
                    for j in range(vectors):
                        x = r * vectors + j
                        acc[x] = ir.dot_bf16(acc[x], loaded[j], weight) if bf16_ else ir.fma(loaded[j], weight, acc[x])
            return acc

        def some_rows(i, _):
            row = [ir.at(ir.times(i, rows), r) for r in range(rows)]
            p_row = [ir.at(p, builder.mul(ldp, r)) for r in row]

            def some_vectors(j, _):
                first = ir.times(j, 64 * vectors)
                skipped = ir.times(first, 4) if kv_ == INT8_KV else first
                acc = ir.loop(blocks, [ir.zero()] * (rows * vectors), partial(block, p_row, skipped))
                for x, total in enumerate(acc):
                    r = row[x // vectors]
                    factor = ir.load_splat(F32, ir.at(factors, ir.times(r, 4)))
                    target = ir.at(o, builder.mul(ldo, r), first)
                    ir.store(builder.fmul(total, factor), target, 64 * (x % vectors))
                return []

            ir.loop(I64(vectors_ // vectors), [], some_vectors)
            return []

        ir.loop(I64(rows_ // rows), [], some_rows)
        return context.get_dummy_value()

    return types.void(isa, kv, rows, vectors, *[types.int64] * 13), codegen


@inner
def score(isa, kv, rows, q, ldq, k, k_scales, scores, ldscores, head_dim, next_k):
    """score_tile as a function to be compiled on its own, once for each (isa, kv, rows)."""
    score_tile(isa, kv, rows, q, ldq, k, k_scales, scores, ldscores, head_dim, next_k)


@inner
def softmax(isa, kv, windowed, scale, start, scores, length, blocks, table, v_scales, block_bytes, factor):
    """softmax_row as a function to be compiled on its own, once for each (isa, kv, windowed); 1 / sum goes to the
    float32 at address `factor`."""
    total = softmax_row(isa, kv, windowed, scale, start, scores, length, blocks, table, v_scales, block_bytes)
    put_float(factor, total)


@inner
def value(
    isa, kv, rows, vectors, p, ldp, table, blocks, v, block_bytes, factors, o, ldo, head_dim,
    next_v, next_table, next_blocks,
):  # fmt: skip
    """value_tile as a function to be compiled on its own, once for each (isa, kv, rows, vectors)."""
    value_tile(
        isa, kv, rows, vectors, p, ldp, table, blocks, v, block_bytes, factors, o, ldo, head_dim,
        next_v, next_table, next_blocks,
    )  # fmt: skip


@inner
def cap_scores(x, scale, cap, count):
    """cap_row as a function to be compiled on its own."""
    cap_row(x, scale, cap, count)


@compiled
def attend(
    tiles, keys, values, key_scales, value_scales, kv_head, rows, per_token, length, table,
    q, q_bytes, o, head_dim, scale, window, cap, scores, factors, next_keys, next_table, next_blocks,
):  # fmt: skip
    """`rows` query rows of one K/V head and one sequence, `per_token` rows a token, consecutive tokens.

    keys, values and, of an 8-bit cache, their scales: one layer's [blocks, kv_heads, ...]. The first token's context is
    `length` positions, the next one's one more; of these a token attends to the last `window`, or to all where that is
    0. table: int64, the sequence's blocks. q: address of the rows as the cache wants them, q_bytes apart; o: of
    head_dim float32 for each. scale: of the scores; cap: c in c * tanh(score / c), or 0. scores: float32 scratch
    [rows, >= 16 * blocks]; factors: float32 [rows]. next_keys: the address of the K/V head that this thread is likely
    to attend to next, next_table the blocks there, next_blocks so many: few rows ask for them while they compute.
    """
    # The first token's window begins first. Where a later row's begins in a later block, its weights before are 0.
    skipped = max(0, length - window) // BLOCK if window else 0
    blocks = (length + rows // per_token - 1 + BLOCK - 1) // BLOCK - skipped
    k, v = address(keys) + kv_head * keys.strides[1], address(values) + kv_head * values.strides[1]
    k_scales = address(key_scales) + kv_head * key_scales.strides[1]
    v_scales = address(value_scales) + kv_head * value_scales.strides[1]
    o_bytes, score_bytes, at_table = head_dim * 4, scores.strides[0], address(table) + 8 * skipped
    by_amx, few, at_next = tiles.attend_rows[1 if cap else 0], rows <= FEW_ROWS, address(next_table)
    next_values = next_keys - address(keys) + address(values)
    if by_amx:
        if not few:  # what comes next is of these blocks, too, but in the second cache
            next_keys, next_values, at_next, next_blocks = k, v, at_table + 8 * AHEAD_BLOCKS, blocks - AHEAD_BLOCKS
        for r in range(0, rows, AMX_ROWS):
            call(
                by_amx, 0, 0, min(AMX_ROWS, rows - r), r, per_token, length - skipped * BLOCK,
                window if window else EVERYWHERE, q + r * q_bytes, q_bytes, k, v, keys.strides[0], at_table, blocks,
                scale, cap, address(scores), o + r * o_bytes, o_bytes,
                next_keys, next_values, at_next, next_blocks, 0 if few else 1,
            )  # fmt: skip
        return
    wanted = next_blocks if few else 0
    for b in range(blocks):
        place, coming = table[skipped + b], next_keys + next_table[b] * keys.strides[0] if b < wanted else 0
        k_b, scales_b = k + place * keys.strides[0], k_scales + place * key_scales.strides[0]
        for r in range(0, rows, TILE_ROWS):
            n, at_q, at_s = min(TILE_ROWS, rows - r), q + r * q_bytes, address(scores) + r * score_bytes + 64 * b
            call(
                tiles.score[n], 0, 0, n, at_q, q_bytes, k_b, scales_b, at_s, score_bytes, head_dim,
                coming if r == 0 else 0,
            )  # fmt: skip
    left = np.float32(1.0) if cap else scale  # to multiply the scores by in the softmax
    for r in range(rows):
        at_s, own, windowed = address(scores) + r * score_bytes, length + r // per_token, min(window, 1)
        if cap:
            call(tiles.cap, at_s, scale, cap, blocks)
        call(
            tiles.softmax[windowed], 0, 0, 0, left, own - window - skipped * BLOCK, at_s, own - skipped * BLOCK, blocks,
            at_table, v_scales, value_scales.strides[0], address(factors) + 4 * r,
        )  # fmt: skip
    for r in range(0, rows, TILE_ROWS):
        n, p, f = min(TILE_ROWS, rows - r), address(scores) + r * score_bytes, address(factors) + 4 * r
        dim, at_o = 0, o + r * o_bytes
        while dim < head_dim:
            vectors = 4 if dim + 64 <= head_dim else 1  # 64 or 16 dimensions
            skipped_bytes = dim * (BLOCK if values.itemsize == 1 else 4)
            call(
                tiles.value[n, vectors], 0, 0, n, vectors, p, score_bytes, at_table, blocks, v + skipped_bytes,
                values.strides[0], f, at_o + 4 * dim, o_bytes, head_dim,
                next_values + skipped_bytes, at_next, wanted if r == 0 else 0,
            )  # fmt: skip
            dim += 16 * vectors
