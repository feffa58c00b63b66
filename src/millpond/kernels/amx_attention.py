"""Attention over bfloat16 K/V by AMX: up to 16 query rows of a sequence against its blocks.

Two passes over the blocks: the scores and the largest of each row; then the exponentials and the sums of the values.
In each, between two products of a block's tiles, the vector units do some rows of the block before or after, and some
lines are asked for of the K/V that comes next. A row's products are summed up in the same order whatever rows are
beside it: along a head's dimensions for a score, block by block for a value.
"""

from functools import partial

from llvmlite.ir import Constant
from numba import types
from numba.extending import intrinsic

from millpond.kernels.amx import AMX_ROWS, configure, load_tile, room, store_tile, tile_call
from millpond.kernels.attention_int8 import BLOCK
from millpond.kernels.isa import AVX512
from millpond.kernels.jit import inner
from millpond.kernels.pointwise import capped
from millpond.kernels.simd import F32, I32, I64, LOG2_E, V16F32, V16I32, Ir

# The layouts of attention.py are operands as they stand: the keys of a block, 32 dimensions after the other, and the
# values of a block, 16 dimensions beside the other.
PIECE = 32  # dimensions of a head, in a line of bfloat16
MOST_DIMS = 4 * PIECE  # so many leave registers for keys and sums beside a row's
LINE = 64
VALUE_TILES = 4  # side by side
# Tile registers, after those of the queries, and later of the sums: scores; keys; the weights of a block; its values.
SCORES_TILE, KEYS_TILE, WEIGHTS_TILE, VALUES_TILE = 4, 5, 6, 7
LOWEST = -3.0e38


def fits(head_dim: int) -> bool:
    """Whether heads of so many dimensions can be attended to here."""
    return head_dim % PIECE == 0 and head_dim <= MOST_DIMS


class _Ahead:
    """Cache lines of the i-th block of what comes next, asked for some at a time: a burst would be waited for."""

    def __init__(self, ir, base, block_bytes, table, blocks, near, i, lines, times):
        b = ir.b
        self.ir, self.lines, self.times, self.done = ir, lines, times, 0
        there = b.icmp_signed("<", i, blocks)
        self.near, self.far = b.and_(there, near), b.and_(there, b.not_(near))
        place = b.select(there, i, I64(0))
        self.start = ir.at(base, b.mul(ir.load(I64, ir.at(table, ir.times(place, 8))), block_bytes))

    def ask(self):
        first = self.done * self.lines // self.times
        self.done += 1
        for wanted, cache in ((self.near, 3), (self.far, 2)):
            with self.ir.b.if_then(wanted):
                for line in range(first, self.done * self.lines // self.times):
                    self.ir.prefetch(self.start, line * LINE, cache)


class _Rows:
    """The rows of a call: how far each may look, and room for what is kept of it from block to block."""

    def __init__(self, ir, count, first, per_token, length, window):
        b = ir.b
        self.ir, self.count, self.first, self.per_token = ir, count, first, per_token
        self.length, self.window = length, window
        self.peaks, self.sums = room(ir, AMX_ROWS * LINE), room(ir, AMX_ROWS * LINE)
        last_start = b.sub(self._end(b.sub(count, I64(1))), window)
        last_start = b.select(b.icmp_signed(">", last_start, I64(0)), last_start, I64(0))
        self.from_block = b.sdiv(ir.at(last_start, BLOCK - 1), I64(BLOCK))
        self.to_block = b.sdiv(self._end(I64(0)), I64(BLOCK))

    def each(self, work):
        self.ir.loop(self.count, [], lambda r, _: work(r) or [])

    def of_block(self, i, work, share):
        """work(r, inside) for the rows from share[0] to share[1]; inside: of the 16 positions of the i-th block those
        that the row looks at, or None where all rows look at all of them."""
        b, first, until = self.ir.b, I64(share[0]), I64(share[1])
        until = b.select(b.icmp_signed("<", self.count, until), self.count, until)
        from_there, to_there = b.icmp_signed(">=", i, self.from_block), b.icmp_signed("<", i, self.to_block)
        count = b.sub(until, first)

        def rows(inside):
            self.ir.loop(count, [], lambda n, _: work(r := b.add(first, n), inside(r)) or [])

        with b.if_else(b.and_(from_there, to_there)) as (whole, part):
            with whole:
                rows(lambda r: None)
            with part:
                rows(lambda r: self._inside(r, i))

    def _end(self, r):
        """The context of the r-th row."""
        return self.ir.b.add(self.length, self.ir.b.sdiv(self.ir.at(self.first, r), self.per_token))

    def _inside(self, r, i):
        b, lanes = self.ir.b, Constant(V16I32, list(range(BLOCK)))
        end = b.sub(self._end(r), self.ir.times(i, BLOCK))
        start = b.sub(end, self.window)
        start, end = (self.ir.splat(b.trunc(each, I32)) for each in (start, end))
        return b.and_(b.icmp_signed(">=", lanes, start), b.icmp_signed("<", lanes, end))


@intrinsic(prefer_literal=True)
def rows_tile(
    typingctx, head_dim, caps, count, first, per_token, length, window, q, ldq, k, v, block_bytes, table, blocks,
    scale, cap, scores, o, ldo, next_k, next_v, next_table, next_blocks, near,
):  # fmt: skip
    """o[r, 0:head_dim] = softmax(scale * q[r] @ k) @ v for `count` rows, up to AMX_ROWS; bfloat16 q, k and v.

    Addresses, strides in bytes; head_dim and caps (whether scores are capped, at `cap`) literal. These are the rows
    from the `first` on of a group that has `per_token` rows a token; the first token's context is `length` positions,
    the next one's one more, of which each attends to the last `window`. table: int64 block numbers. scores: float32
    scratch [blocks][count][16]; the weights of a block take the first half of its room. next_k, next_v: with next_table
    and so many blocks, what is asked for on the way, for the first cache where near is 1, else for the second.
    """
    dims, caps_ = head_dim.literal_value, caps.literal_value
    pieces, tiles = dims // PIECE, VALUE_TILES if dims % (16 * VALUE_TILES) == 0 else 2
    value_bytes = LINE * dims // 16

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        count, first, per_token, length, window, q, ldq, k, v, block_bytes, table, blocks = args[2:14]
        scale, cap, scores, o, ldo, next_k, next_v, next_table, next_blocks, near = args[14:]
        near = b.icmp_signed("!=", near, I64(0))
        rows = _Rows(ir, count, first, per_token, length, window)
        factor = F32(LOG2_E) if caps_ else b.fmul(scale, F32(LOG2_E))

        def place(base, i):
            return ir.at(base, b.mul(ir.load(I64, ir.at(table, ir.times(i, 8))), block_bytes))

        def scores_at(i):
            return ir.at(scores, b.mul(i, ir.times(count, LINE)))

        def ahead(base, i, times):
            return _Ahead(ir, base, block_bytes, next_table, next_blocks, near, i, dims // 2, times)

        def score_block(i, beside):
            keys, coming = place(k, i), ahead(next_k, i, 2 * pieces)
            tile_call(ir, "tilezero", SCORES_TILE)
            for piece in range(pieces):
                load_tile(ir, KEYS_TILE, ir.at(keys, piece * BLOCK * LINE), I64(LINE))
                coming.ask()
                tile_call(ir, "tdpbf16ps", SCORES_TILE, piece, KEYS_TILE)
                coming.ask()
                beside(piece, pieces)
            store_tile(ir, SCORES_TILE, scores_at(i), I64(LINE))

        def larger(i, r, inside):
            at, peak = ir.at(scores_at(i), ir.times(r, LINE)), ir.at(rows.peaks, ir.times(r, LINE))
            value = ir.load(V16F32, at)
            if caps_:
                value = capped(ir, value, scale, cap)
                ir.store(value, at)
            if inside is not None:
                value = b.select(inside, value, ir.const(V16F32, LOWEST))
            ir.store(ir.select_max(value, ir.load(V16F32, peak)), peak)

        def exponential(i, r, inside):
            at, peak, total = scores_at(i), ir.at(rows.peaks, ir.times(r, LINE)), ir.at(rows.sums, ir.times(r, LINE))
            value = ir.load(V16F32, ir.at(at, ir.times(r, LINE)))
            value = ir.exp2(ir.fma(value, ir.splat(factor), ir.load(V16F32, peak)))
            if inside is not None:
                value = b.select(inside, value, ir.zero())
            ir.store(b.fadd(ir.load(V16F32, total), value), total)
            # no further than this row's scores: those of the next are still to be read
            ir.store(ir.to_bf16(value), ir.at(at, ir.times(r, LINE // 2)))

        def value_block(part, i, beside):
            values, coming = ir.at(place(v, i), part * tiles * LINE), ahead(next_v, i, 2 * tiles)
            load_tile(ir, WEIGHTS_TILE, scores_at(i), I64(LINE // 2))
            for j in range(tiles):
                load_tile(ir, VALUES_TILE, ir.at(values, j * LINE), I64(value_bytes))
                coming.ask()
                tile_call(ir, "tdpbf16ps", j, WEIGHTS_TILE, VALUES_TILE)
                coming.ask()
                beside(j, tiles)

        def turns(by_tiles, by_rows, tiles_lead):
            """All blocks by tiles, and all by rows beside them: one block after, or where rows lead, before."""
            last, all_rows = b.sub(blocks, I64(1)), (0, AMX_ROWS)

            def turn(i, _):
                following = ir.at(i, 1)
                tiled, other = (following, i) if tiles_lead else (i, following)

                def beside(n, of):
                    rows.of_block(other, partial(by_rows, other), (n * AMX_ROWS // of, (n + 1) * AMX_ROWS // of))

                by_tiles(tiled, beside)
                return []

            if tiles_lead:
                by_tiles(I64(0), lambda n, of: None)
            else:
                rows.of_block(I64(0), partial(by_rows, I64(0)), all_rows)
            ir.loop(last, [], turn)
            if tiles_lead:
                rows.of_block(last, partial(by_rows, last), all_rows)
            else:
                by_tiles(last, lambda n, of: None)

        def begin(r):
            ir.store(ir.const(V16F32, LOWEST), ir.at(rows.peaks, ir.times(r, LINE)))
            ir.store(ir.zero(), ir.at(rows.sums, ir.times(r, LINE)))

        def from_peak(r):
            at = ir.at(rows.peaks, ir.times(r, LINE))
            peak = ir.reduce(ir.select_max, ir.load(V16F32, at))
            ir.store(ir.splat(b.fneg(b.fmul(peak, factor))), at)

        def leave(part):
            out = room(ir, tiles * AMX_ROWS * LINE)
            for j in range(tiles):
                store_tile(ir, j, ir.at(out, j * LINE), I64(tiles * LINE))

            def row(r):
                total = ir.reduce(b.fadd, ir.load(V16F32, ir.at(rows.sums, ir.times(r, LINE))))
                inverse = ir.splat(b.fdiv(F32(1.0), total))
                source, target = ir.at(out, ir.times(r, tiles * LINE)), ir.at(o, b.mul(r, ldo), part * tiles * LINE)
                for j in range(tiles):
                    ir.store(b.fmul(ir.load(V16F32, source, j * LINE), inverse), target, j * LINE)

            rows.each(row)

        configure(ir, [(count, LINE)] * 5 + [(I64(BLOCK), LINE), (count, LINE // 2), (I64(BLOCK // 2), LINE)])
        for piece in range(pieces):
            load_tile(ir, piece, ir.at(q, piece * LINE), ldq)
        rows.each(begin)
        turns(score_block, larger, tiles_lead=True)
        rows.each(from_peak)
        for part in range(dims // (16 * tiles)):
            for j in range(tiles):
                tile_call(ir, "tilezero", j)
            if part == 0:
                turns(partial(value_block, 0), exponential, tiles_lead=False)
            else:
                ir.loop(blocks, [], lambda i, _, part=part: value_block(part, i, lambda n, of: None) or [])
            leave(part)
        tile_call(ir, "tilerelease")
        return context.get_dummy_value()

    return types.void(head_dim, caps, *[types.int64] * 12, types.float32, types.float32, *[types.int64] * 8), codegen


@inner
def attend_rows(
    head_dim, caps, count, first, per_token, length, window, q, ldq, k, v, block_bytes, table, blocks,
    scale, cap, scores, o, ldo, next_k, next_v, next_table, next_blocks, near,
):  # fmt: skip
    """rows_tile as a function to be compiled on its own, once for each (head_dim, caps)."""
    rows_tile(
        head_dim, caps, count, first, per_token, length, window, q, ldq, k, v, block_bytes, table, blocks,
        scale, cap, scores, o, ldo, next_k, next_v, next_table, next_blocks, near,
    )  # fmt: skip
