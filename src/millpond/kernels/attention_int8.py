"""Attention over a cache of 8-bit keys and values: the tiles of attention.py for it, and what puts a row into it.

A key meets the query in integers, 16 dimensions at a time with a scale of their own on both sides. A value has one
scale, which goes into the probability of its position; those of a block are rounded to 8 bits by a scale of the block.
"""

from functools import partial

from llvmlite.ir import Constant, VectorType
from numba import types
from numba.extending import intrinsic

from millpond.kernels.simd import F32, I32, I64, V16F32, V16I8, V16I16, V16I32, Ir

# A block of 16 positions, per K/V head:
#
#     keys    [head_dim/4][16][4] codes from 128, four dimensions of a position side by side; scales [head_dim/16][16]
#             bfloat16
#     values  [4][head_dim][4] codes, four positions of a dimension side by side; scales [16] float32
#
# a query: [head_dim] codes, then for each 16 dimensions [float32 scale, int32 -128 * sum of codes]; and the
# probabilities of a row: for each block 16 codes, a float32 scale, and room.
#
# What is not finite makes its scale not a number, and with it every sum that the scale is in.
BLOCK = 16
DIMS = 16  # of keys and queries that share a scale
MOST = 126.0  # the largest code, with room for a scale that was rounded down to bfloat16
P_BYTES = 32
LOWEST = -3.0e38
VANISHING = 2.0**-126  # 1 divided by a smaller scale may be infinite: its codes are 0


def key_bytes(head_dim):
    """Of a block, one K/V head."""
    return BLOCK * head_dim + head_dim // DIMS * BLOCK * 2


def value_bytes(head_dim):
    """Of a block, one K/V head."""
    return BLOCK * head_dim + BLOCK * 4


def query_bytes(head_dim):
    """Of one head of one token."""
    return head_dim + head_dim // DIMS * 8


def _magnitude(ir, value):
    """|value| as an integer, which has the same order; NaN comes out on top."""
    return ir.b.and_(ir.b.bitcast(value, V16I32), ir.const(V16I32, 0x7FFFFFFF))


def _larger(ir, x, y):
    return ir.b.select(ir.b.icmp_signed(">", x, y), x, y)


def _scale(ir, magnitude, most):
    """The largest of 16 magnitudes divided by the largest code; not a number where it is not finite."""
    b = ir.b
    peak = b.bitcast(ir.reduce(partial(_larger, ir), magnitude), F32)
    finite = b.fcmp_ordered("<", peak, F32(float("inf")))
    return b.select(finite, b.fmul(peak, F32(1 / most)), F32(float("nan")))


def _inverse(ir, scale):
    b = ir.b
    vanishes = b.fcmp_ordered("<", scale, F32(VANISHING))
    return ir.splat(b.select(vanishes, F32(0.0), b.fdiv(F32(1.0), scale)))


def _codes(ir, value, inverse):
    """round(value * inverse) as <16 x i32>: adding 1.5 * 2**23 leaves the nearest integer in the low bits."""
    b = ir.b
    shifted = b.fadd(b.fmul(value, inverse), ir.const(V16F32, 12582912.0))
    return b.sub(b.bitcast(shifted, V16I32), ir.const(V16I32, 0x4B400000))


@intrinsic
def quantise_query(typingctx, x, target, head_dim):
    """head_dim floats at x as a query at target."""

    def codegen(context, builder, signature, args):
        ir, (x, target, head_dim) = Ir(builder), args

        def some_dims(g, _):
            value = ir.load(V16F32, ir.at(x, ir.times(g, DIMS * 4)))
            scale = _scale(ir, _magnitude(ir, value), MOST)
            codes = _codes(ir, value, _inverse(ir, scale))
            ir.store(builder.trunc(codes, V16I8), ir.at(target, ir.times(g, DIMS)))
            pair = ir.at(target, head_dim, ir.times(g, 8))
            ir.store(scale, pair)
            ir.store(builder.mul(ir.reduce(builder.add, codes), I32(-128)), pair, 4)
            return []

        ir.loop(builder.sdiv(head_dim, I64(DIMS)), [], some_dims)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def put_key_int8(typingctx, x, block, offset, head_dim):
    """head_dim floats at x as the key of position `offset` of the block at `block`."""

    def codegen(context, builder, signature, args):
        ir, (x, block, offset, head_dim) = Ir(builder), args
        codes_at = ir.at(block, ir.times(offset, 4))
        scales_at = ir.at(block, ir.times(head_dim, BLOCK), ir.times(offset, 2))

        def some_dims(g, _):
            value = ir.load(V16F32, ir.at(x, ir.times(g, DIMS * 4)))
            exact = ir.splat(_scale(ir, _magnitude(ir, value), MOST))
            rounded = builder.extract_element(ir.to_bf16(exact), I32(0))
            scale = builder.bitcast(builder.shl(builder.zext(rounded, I32), I32(16)), F32)
            codes = builder.trunc(_codes(ir, value, _inverse(ir, scale)), V16I8)
            fours = builder.bitcast(builder.xor(codes, ir.const(V16I8, -128)), VectorType(I32, 4))
            for i in range(4):
                ir.store(builder.extract_element(fours, I32(i)), ir.at(codes_at, ir.times(g, 4 * 64)), 64 * i)
            ir.store(rounded, ir.at(scales_at, ir.times(g, 2 * BLOCK)))
            return []

        ir.loop(builder.sdiv(head_dim, I64(DIMS)), [], some_dims)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def put_value_int8(typingctx, x, block, offset, head_dim):
    """head_dim floats at x as the value of position `offset` of the block at `block`; its bytes are written one by one,
    since another thread may write those between them."""

    def codegen(context, builder, signature, args):
        ir, (x, block, offset, head_dim) = Ir(builder), args
        vectors = builder.sdiv(head_dim, I64(16))

        def load(i):
            return ir.load(V16F32, ir.at(x, ir.times(i, 64)))

        def largest(i, acc):
            return [_larger(ir, acc[0], _magnitude(ir, load(i)))]

        (magnitude,) = ir.loop(vectors, [ir.const(V16I32, 0)], largest)
        scale = _scale(ir, magnitude, MOST)
        inverse = _inverse(ir, scale)
        ir.store(scale, ir.at(block, ir.times(head_dim, BLOCK), ir.times(offset, 4)))
        row = ir.times(builder.mul(builder.lshr(offset, I64(2)), head_dim), 4)
        first = ir.at(block, row, builder.and_(offset, I64(3)))

        def some_dims(i, _):
            codes = builder.trunc(_codes(ir, load(i), inverse), V16I8)
            for lane in range(16):
                ir.store(builder.extract_element(codes, I32(lane)), ir.at(first, ir.times(i, 64)), 4 * lane)
            return []

        ir.loop(vectors, [], some_dims)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def emit_score(ir, rows, q, ldq, k, scores, lds, scale, head_dim):
    """scores[0:rows, 0:16] = scale * q @ k for one block of keys."""
    builder = ir.b
    size, factor, scales_at = ir.together(rows, 3), ir.splat(scale), ir.at(k, ir.times(head_dim, BLOCK))

    def some_dims(q_row, g, acc):
        k_g, pairs = ir.at(k, ir.times(g, 4 * 64)), [ir.at(q_r, head_dim, ir.times(g, 8)) for q_r in q_row]
        keys = [ir.load(V16I32, k_g, 64 * i) for i in range(4)]
        half = ir.load(V16I16, ir.at(scales_at, ir.times(g, 2 * BLOCK)))
        k_scale = builder.bitcast(builder.shl(builder.zext(half, V16I32), ir.const(V16I32, 16)), V16F32)
        result = []
        for q_r, pair, total in zip(q_row, pairs, acc, strict=True):
            dot = ir.dot_start(ir.load_splat(I32, pair, 4))
            for i in range(4):
                dot = ir.dot_u8s8(dot, keys[i], ir.load_splat(I32, ir.at(q_r, ir.times(g, DIMS)), 4 * i))
            scaled = builder.fmul(builder.sitofp(dot, V16F32), ir.load_splat(F32, pair))
            result.append(ir.fma(scaled, k_scale, total))
        return result

    def some_rows(i, _):
        row = [ir.at(ir.times(i, size), r) for r in range(size)]
        q_row = [ir.at(q, builder.mul(ldq, r)) for r in row]
        totals = ir.loop(builder.sdiv(head_dim, I64(DIMS)), [ir.zero()] * size, partial(some_dims, q_row))
        for r, total in zip(row, totals, strict=True):
            ir.store(builder.fmul(total, factor), ir.at(scores, builder.mul(lds, r)))
        return []

    ir.loop(I64(rows // size), [], some_rows)


def emit_softmax(ir, scores, length, blocks, table, v, block_bytes, head_dim):
    """exp(scores[i] - max) times the scale of value i for i < length, 0 from there to 16 * blocks, as codes over the
    scores; returns 1 / the sum of the exponentials."""
    builder = ir.b
    lanes = Constant(V16I32, list(range(16)))
    own_blocks = builder.sdiv(builder.add(length, I64(BLOCK - 1)), I64(BLOCK))
    scales_at = ir.at(v, ir.times(head_dim, BLOCK))

    def score(i):
        left = builder.trunc(builder.sub(length, ir.times(i, BLOCK)), I32)
        inside = builder.icmp_signed("<", lanes, ir.splat(left))
        return ir.load(V16F32, ir.at(scores, ir.times(i, 64))), inside

    def larger(i, acc):
        value, inside = score(i)
        return [ir.select_max(builder.select(inside, value, ir.const(V16F32, LOWEST)), acc[0])]

    (peak,) = ir.loop(own_blocks, [ir.const(V16F32, LOWEST)], larger)
    peak = ir.splat(ir.reduce(ir.select_max, peak))

    def exponentials(i, acc):
        value, inside = score(i)
        value = builder.select(inside, ir.exp(builder.fsub(value, peak)), ir.zero())
        number = ir.load(I64, ir.at(table, ir.times(i, 8)))
        v_scale = ir.load(V16F32, ir.at(scales_at, builder.mul(number, block_bytes)))
        weight = builder.select(inside, builder.fmul(value, v_scale), ir.zero())
        scale = _scale(ir, _magnitude(ir, weight), 255.0)
        at = ir.at(scores, ir.times(i, P_BYTES))
        ir.store(builder.trunc(_codes(ir, weight, _inverse(ir, scale)), V16I8), at)
        ir.store(scale, at, 16)
        return [builder.fadd(acc[0], value)]

    (total,) = ir.loop(own_blocks, [ir.zero()], exponentials)

    def nothing(i, _):
        at = ir.at(scores, ir.times(builder.add(own_blocks, i), P_BYTES))
        ir.store(ir.const(V16I8, 0), at)
        ir.store(F32(0.0), at, 16)
        return []

    ir.loop(builder.sub(blocks, own_blocks), [], nothing)
    return builder.fdiv(F32(1.0), ir.reduce(builder.fadd, total))


def emit_value(ir, rows, vectors, p, ldp, table, blocks, v, block_bytes, factors, o, ldo, head_dim):
    """o[r, 0:16 * vectors] = factors[r] * p[r] @ values over a sequence's blocks; table: int64 block numbers."""
    builder, most_rows, most_vectors = ir.b, rows, vectors
    row_bytes, rows, vectors = ir.times(head_dim, 4), ir.together(most_rows, 3), ir.together(most_vectors, 1)

    def block(p_row, v, i, acc):
        acc = list(acc)
        number = ir.load(I64, ir.at(table, ir.times(i, 8)))
        values = ir.at(v, builder.mul(number, block_bytes))
        places = [ir.at(p_r, ir.times(i, P_BYTES)) for p_r in p_row]
        scales = [ir.load_splat(F32, at, 16) for at in places]
        for j in range(vectors):
            loaded = [ir.load(V16I32, ir.at(values, builder.mul(row_bytes, I64(k))), 64 * j) for k in range(4)]
            for r in range(rows):
                dot = ir.const(V16I32, 0)
                for k in range(4):
                    dot = ir.dot_whole_u8s8(dot, ir.load_splat(I32, places[r], 4 * k), loaded[k])
                x = r * vectors + j
                acc[x] = ir.fma(builder.sitofp(dot, V16F32), scales[r], acc[x])
        return acc

    def some_rows(i, _):
        row = [ir.at(ir.times(i, rows), r) for r in range(rows)]
        p_row = [ir.at(p, builder.mul(ldp, r)) for r in row]

        def some_vectors(j, _):
            first = ir.times(j, 64 * vectors)
            acc = ir.loop(blocks, [ir.zero()] * (rows * vectors), partial(block, p_row, ir.at(v, first)))
            for x, total in enumerate(acc):
                r = row[x // vectors]
                factor = ir.load_splat(F32, ir.at(factors, ir.times(r, 4)))
                ir.store(builder.fmul(total, factor), ir.at(o, builder.mul(ldo, r), first), 64 * (x % vectors))
            return []

        ir.loop(I64(most_vectors // vectors), [], some_vectors)
        return []

    ir.loop(I64(most_rows // rows), [], some_rows)
