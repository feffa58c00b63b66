"""Attention over bfloat16 K/V by AMX: up to 16 query rows against a block at once.

A row's products are summed up in the same order whatever rows are beside it: along a head's dimensions for a score,
block by block for a value.
"""

from numba import types
from numba.extending import intrinsic

from millpond.kernels.amx import AMX_ROWS, configure, load_tile, room, store_tile, tile_call
from millpond.kernels.attention_int8 import BLOCK
from millpond.kernels.isa import AVX512
from millpond.kernels.jit import inner
from millpond.kernels.simd import F32, I64, V16F32, V16I32, Ir

# The layouts of attention.py are operands as they stand: the keys of a block, 32 dimensions after the other, and the
# values of a block, 16 dimensions beside the other.
PIECE = 32  # dimensions of a head, in a line of bfloat16
MOST_DIMS = 4 * PIECE  # so many leave registers for keys and sums beside a row's
LINE = 64
VALUE_TILES = 4  # side by side


def fits(head_dim: int) -> bool:
    """Whether heads of so many dimensions can be attended to here."""
    return head_dim % PIECE == 0 and head_dim <= MOST_DIMS


def _rows_at_a_time(ir, rows, work):
    """work(first, count) for AMX_ROWS rows after the other, and for those that are left."""

    def some_rows(i, _):
        first = ir.times(i, AMX_ROWS)
        left, most = ir.b.sub(rows, first), I64(AMX_ROWS)
        work(first, ir.b.select(ir.b.icmp_signed("<", left, most), left, most))
        return []

    ir.loop(ir.b.sdiv(ir.at(rows, AMX_ROWS - 1), I64(AMX_ROWS)), [], some_rows)
    tile_call(ir, "tilerelease")


def _block_at(ir, base, block_bytes, table, i):
    return ir.at(base, ir.b.mul(ir.load(I64, ir.at(table, ir.times(i, 8))), block_bytes))


@intrinsic(prefer_literal=True)
def scores_tile(typingctx, head_dim, rows, q, ldq, k, v, block_bytes, table, blocks, scores, ldscores):
    """scores[0:rows, 0:16 * blocks] = q @ k over a sequence's blocks; bfloat16 q and k, table: int64 block
    numbers. v: the values: up to AMX_ROWS rows, which would wait for memory, ask for them here already."""
    pieces = head_dim.literal_value // PIECE

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        rows, q, ldq, k, v, block_bytes, table, blocks, scores, lds = args[1:]
        zeros, last = room(ir, LINE), b.sub(blocks, I64(1))
        asked = b.select(b.icmp_signed("<=", rows, I64(AMX_ROWS)), I64(pieces * AMX_ROWS), I64(0))  # cache lines
        ir.store(ir.const(V16I32, 0), zeros)
        key_tiles, sums = (pieces, pieces + 1), (pieces + 2, pieces + 3)

        def some_rows(first, count):
            configure(ir, [(count, LINE)] * pieces + [(I64(AMX_ROWS), LINE)] * 2 + [(count, LINE)] * 2)
            q_r, scores_r = ir.at(q, b.mul(first, ldq)), ir.at(scores, b.mul(first, lds))
            for piece in range(pieces):
                load_tile(ir, piece, ir.at(q_r, piece * LINE), ldq)

            def block(i, turn):
                values = _block_at(ir, v, block_bytes, table, i)
                ir.loop(asked, [], lambda n, _: ir.prefetch(ir.at(values, ir.times(n, LINE)), near=2) or [])
                keys = _block_at(ir, k, block_bytes, table, i)
                load_tile(ir, sums[turn], zeros, I64(0))
                for piece in range(pieces):
                    load_tile(ir, key_tiles[piece % 2], ir.at(keys, piece * AMX_ROWS * LINE), I64(LINE))
                    tile_call(ir, "tdpbf16ps", sums[turn], piece, key_tiles[piece % 2])
                store_tile(ir, sums[turn], ir.at(scores_r, ir.times(i, LINE)), lds)

            def two_blocks(i, _):
                block(ir.times(i, 2), 0)
                block(ir.at(ir.times(i, 2), 1), 1)
                return []

            ir.loop(b.ashr(blocks, I64(1)), [], two_blocks)
            ir.loop(b.and_(blocks, I64(1)), [], lambda _, __: block(last, 0) or [])

        _rows_at_a_time(ir, rows, some_rows)
        return context.get_dummy_value()

    return types.void(head_dim, *[types.int64] * 10), codegen


@intrinsic(prefer_literal=True)
def values_tile(typingctx, head_dim, rows, p, ldp, table, blocks, v, block_bytes, factors, o, ldo):
    """o[r, 0:head_dim] = factors[r] * p[r] @ values over a sequence's blocks; bfloat16 p and values, else float32."""
    dims = head_dim.literal_value
    tiles = VALUE_TILES if dims % (16 * VALUE_TILES) == 0 else 2
    value_bytes = LINE * dims // 16

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        rows, p, ldp, table, blocks, v, block_bytes, factors, o, ldo = args[1:]
        zeros, place = room(ir, LINE), room(ir, tiles * AMX_ROWS * LINE)
        ir.store(ir.const(V16I32, 0), zeros)
        sums = range(3, 3 + tiles)

        def some_rows(first, count):
            shapes = [(count, LINE // 2), *[(I64(BLOCK // 2), LINE)] * 2, *[(count, LINE)] * tiles]
            configure(ir, shapes)
            p_r = ir.at(p, b.mul(first, ldp))

            def some_dims(part, _):
                skipped = ir.times(part, tiles * LINE)
                for each in sums:
                    load_tile(ir, each, zeros, I64(0))

                def block(i, _):
                    values = ir.at(_block_at(ir, v, block_bytes, table, i), skipped)
                    load_tile(ir, 0, ir.at(p_r, ir.times(i, LINE // 2)), ldp)
                    for j, each in enumerate(sums):
                        load_tile(ir, 1 + j % 2, ir.at(values, j * LINE), I64(value_bytes))
                        tile_call(ir, "tdpbf16ps", each, 0, 1 + j % 2)
                    return []

                ir.loop(blocks, [], block)
                for j, each in enumerate(sums):
                    store_tile(ir, each, ir.at(place, j * LINE), I64(tiles * LINE))

                def put(r, _):
                    at = ir.at(first, r)
                    factor = ir.load_splat(F32, ir.at(factors, ir.times(at, 4)))
                    source, target = ir.at(place, ir.times(r, tiles * LINE)), ir.at(o, b.mul(at, ldo), skipped)
                    for j in range(tiles):
                        ir.store(b.fmul(ir.load(V16F32, source, j * LINE), factor), target, j * LINE)
                    return []

                ir.loop(count, [], put)
                return []

            ir.loop(I64(dims // (16 * tiles)), [], some_dims)

        _rows_at_a_time(ir, rows, some_rows)
        return context.get_dummy_value()

    return types.void(head_dim, *[types.int64] * 10), codegen


@inner
def all_scores(head_dim, rows, q, ldq, k, v, block_bytes, table, blocks, scores, ldscores):
    """scores_tile as a function to be compiled on its own, once for each head_dim."""
    scores_tile(head_dim, rows, q, ldq, k, v, block_bytes, table, blocks, scores, ldscores)


@inner
def all_values(head_dim, rows, p, ldp, table, blocks, v, block_bytes, factors, o, ldo):
    """values_tile as a function to be compiled on its own, once for each head_dim."""
    values_tile(head_dim, rows, p, ldp, table, blocks, v, block_bytes, factors, o, ldo)
