"""Attention over a cache of 8-bit keys and values: the tiles of attention.py for it, and what puts a row into it.

A key meets the query in integers, 16 dimensions at a time with a scale of their own on both sides. A value has one
scale, which goes into the probability of its position; those of a block are rounded to 8 bits by a scale of the block.
"""

from llvmlite.ir import VectorType
from numba import types
from numba.extending import intrinsic

from millpond.kernels.simd import F32, I32, I64, V16F32, V16I8, V16I16, V16I32, Ir

# A block of 16 positions, per K/V head:
#
#     keys    codes from 128, [head_dim/4][16][4]: four dimensions of a position side by side
#             scales, bfloat16 [head_dim/16][16]
#     values  codes, [head_dim/16][4][16][4]: four positions of a dimension side by side, 16 dimensions after the other
#             scales, float32 [16]
#
# and the scales stand in arrays of their own: codes of blocks that follow each other are then read line after line,
# which is what a processor fetches ahead by itself. Beside these,
#
#     a query: [head_dim] codes, then for each 16 dimensions [float32 scale, int32 -128 * sum of codes]
#     the probabilities of a row: for each block 16 codes, a float32 scale, and room
#
# What is not finite makes its scale not a number, and with it every sum that the scale is in.
BLOCK = 16
DIMS = 16  # of keys and queries that share a scale
MOST = 126.0  # the largest code, with room for a scale that was rounded down to bfloat16
P_BYTES = 32
VANISHING = 2.0**-126  # 1 divided by a smaller scale may be infinite: its codes are 0


def code_bytes(head_dim):
    """Of a block's keys or values, one K/V head."""
    return BLOCK * head_dim


def scale_bytes(head_dim):
    """Room for a block's scales of keys or of values, one K/V head."""
    return max(head_dim // DIMS * BLOCK * 2, BLOCK * 4)


def query_bytes(head_dim):
    """Of one head of one token."""
    return head_dim + head_dim // DIMS * 8


def _scale(ir, magnitude, most):
    """The largest of 16 magnitudes divided by the largest code; not a number where it is not finite."""
    b = ir.b
    peak = b.bitcast(ir.reduce(ir.larger, magnitude), F32)
    finite = b.fcmp_ordered("<", peak, F32(float("inf")))
    return b.select(finite, b.fmul(peak, F32(1 / most)), F32(float("nan")))


def _inverse(ir, scale):
    b = ir.b
    vanishes = b.fcmp_ordered("<", scale, F32(VANISHING))
    return ir.splat(b.select(vanishes, F32(0.0), b.fdiv(F32(1.0), scale)))


def _codes(ir, value, inverse):
    return ir.nearest(ir.b.fmul(value, inverse))


@intrinsic
def quantise_query(typingctx, x, target, head_dim):
    """head_dim floats at x as a query at target."""

    def codegen(context, builder, signature, args):
        ir, (x, target, head_dim) = Ir(builder), args

        def some_dims(g, _):
            value = ir.load(V16F32, ir.at(x, ir.times(g, DIMS * 4)))
            scale = _scale(ir, ir.magnitude(value), MOST)
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
def put_key_int8(typingctx, x, block, scales, offset, head_dim):
    """head_dim floats at x as the key of position `offset` of a block; the addresses of its codes and of its scales."""

    def codegen(context, builder, signature, args):
        ir, (x, block, scales, offset, head_dim) = Ir(builder), args
        codes_at, scales_at = ir.at(block, ir.times(offset, 4)), ir.at(scales, ir.times(offset, 2))

        def some_dims(g, _):
            value = ir.load(V16F32, ir.at(x, ir.times(g, DIMS * 4)))
            exact = ir.splat(_scale(ir, ir.magnitude(value), MOST))
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

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def put_value_int8(typingctx, x, block, scales, offset, head_dim):
    """head_dim floats at x as the value of position `offset` of a block; bytes are written one by one, since another
    thread may write those between them."""

    def codegen(context, builder, signature, args):
        ir, (x, block, scales, offset, head_dim) = Ir(builder), args
        vectors = builder.sdiv(head_dim, I64(16))

        def load(i):
            return ir.load(V16F32, ir.at(x, ir.times(i, 64)))

        def largest(i, acc):
            return [ir.larger(acc[0], ir.magnitude(load(i)))]

        (magnitude,) = ir.loop(vectors, [ir.const(V16I32, 0)], largest)
        scale = _scale(ir, magnitude, MOST)
        inverse = _inverse(ir, scale)
        ir.store(scale, ir.at(scales, ir.times(offset, 4)))
        first = ir.at(block, ir.times(builder.lshr(offset, I64(2)), 64), builder.and_(offset, I64(3)))

        def some_dims(i, _):
            codes = builder.trunc(_codes(ir, load(i), inverse), V16I8)
            for lane in range(16):
                ir.store(builder.extract_element(codes, I32(lane)), ir.at(first, ir.times(i, 256)), 4 * lane)
            return []

        ir.loop(vectors, [], some_dims)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _load(ir, coming, block, offset):
    coming.ask(ir.at(block, offset))
    return ir.load(V16I32, block, offset)


def score_dims(ir, coming, k, k_scales, head_dim, q_row, g, acc):
    """acc + q @ k for the g-th 16 dimensions of some queries and a block of keys (attention.py's score_tile)."""
    b, result = ir.b, []
    k_g, pairs = ir.at(k, ir.times(g, 4 * 64)), [ir.at(q_r, head_dim, ir.times(g, 8)) for q_r in q_row]
    keys = [_load(ir, coming, k_g, 64 * i) for i in range(4)]
    half = ir.load(V16I16, ir.at(k_scales, ir.times(g, 2 * BLOCK)))
    k_scale = b.bitcast(b.shl(b.zext(half, V16I32), ir.const(V16I32, 16)), V16F32)
    for q_r, pair, total in zip(q_row, pairs, acc, strict=True):
        dot = ir.dot_start(ir.load_splat(I32, pair, 4))
        for i in range(4):
            dot = ir.dot_u8s8(dot, keys[i], ir.load_splat(I32, ir.at(q_r, ir.times(g, DIMS)), 4 * i))
        result.append(ir.fma(b.fmul(b.sitofp(dot, V16F32), ir.load_splat(F32, pair)), k_scale, total))
    return result


def put_probabilities(ir, scores, v_scales, i, value, inside):
    """16 probabilities times the scales of the i-th block's values, as codes over its scores; 0 where not inside."""
    weight = ir.b.select(inside, ir.b.fmul(value, ir.load(V16F32, v_scales)), ir.zero())
    scale = _scale(ir, ir.magnitude(weight), 255.0)
    at = ir.at(scores, ir.times(i, P_BYTES))
    ir.store(ir.b.trunc(_codes(ir, weight, _inverse(ir, scale)), V16I8), at)
    ir.store(scale, at, 16)


def value_block(ir, coming, vectors, p_row, values, i, acc):
    """acc + p @ values of the i-th block, for some rows and 16 * vectors dimensions (attention.py's value_tile)."""
    acc = list(acc)
    places = [ir.at(p_r, ir.times(i, P_BYTES)) for p_r in p_row]
    scales = [ir.load_splat(F32, at, 16) for at in places]
    for j in range(vectors):
        loaded = [_load(ir, coming, values, 256 * j + 64 * k) for k in range(4)]
        for r, place in enumerate(places):
            dot = ir.const(V16I32, 0)
            for k in range(4):
                dot = ir.dot_whole_u8s8(dot, ir.load_splat(I32, place, 4 * k), loaded[k])
            x = r * vectors + j
            acc[x] = ir.fma(ir.b.sitofp(dot, V16F32), scales[r], acc[x])
    return acc
