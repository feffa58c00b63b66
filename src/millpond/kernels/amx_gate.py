"""Gate and up by AMX, rows after the first: activation(gate) * up, as bfloat16, the input of the down projection.

The sums of gate and of up meet in a room that stays in the first cache, and what becomes of them is computed between
the products of the next rows: the units for vectors have little else to do there.
"""

from functools import partial

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from millpond.kernels.amx import PAIR_BYTES, STEP, configure, products, shapes, store_tile, tile_call
from millpond.kernels.isa import AVX512
from millpond.kernels.jit import inner
from millpond.kernels.matmul import AMX_ROWS, LINE, ROW_BYTES, SUMS_BYTES, VECTORS
from millpond.kernels.pointwise import gelu_by_tanh, silu
from millpond.kernels.simd import I64, V16F32, Ir

BOTH = 2 * AMX_ROWS


@intrinsic(prefer_literal=True)
def gated_tile(typingctx, gelu, waiting, rows, room, a, lda, gate, up, target, ldtarget, steps):
    """target[0:waiting + rows, 0:48] = activation(A @ gate) * (A @ up), bfloat16, for two BF16 tiles of 48 columns.
    Addresses, strides in bytes; gelu literal, its tanh form where 1, silu where 0.

    waiting: the first so many rows (up to 32) have been multiplied: their sums are at `room`, those of up SUMS_BYTES
    behind those of gate, ROW_BYTES from row to row. a: of the rows after these. room: of 4 * SUMS_BYTES.
    """
    activation = gelu_by_tanh if gelu.literal_value else silu

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        waiting, rows, room, a, lda, gate, up, target, ldtarget, steps = args[1:]

        def put(row, source, target, j):
            """A vector of a row that waits."""
            sums = ir.at(source, ir.times(row, ROW_BYTES))
            x, u = (ir.load(V16F32, sums, each + j * LINE) for each in (0, SUMS_BYTES))
            value = ir.to_bf16(b.fmul(activation(ir, x), u))
            ir.store(value, ir.at(target, b.mul(row, ldtarget)), j * LINE // 2)

        def put_row(source, target, row, _):
            for j in range(VECTORS):
                put(row, source, target, j)
            return []

        def some_rows(first, count, together, i, carried):
            """The products of the i-th rows, while those that wait are put."""
            waiting, source, target = carried
            a_b, mine = ir.at(a, b.mul(first, lda)), ir.at(room, ir.times(b.and_(i, I64(1)), 2 * SUMS_BYTES))

            def multiply(side, carried):
                (done,) = carried
                w = b.select(b.icmp_signed("==", side, I64(0)), gate, up)
                for register in range(together * VECTORS):
                    tile_call(ir, "tilezero", register)

                def step(puts, k, _):
                    w_k, a_k = ir.at(w, ir.times(k, STEP // 2 * PAIR_BYTES)), ir.at(a_b, ir.times(k, 2 * STEP))
                    for j in range(VECTORS):
                        for instruction in products(ir, together, a_k, lda, w_k, [j]):
                            instruction()
                        if puts:
                            put(b.add(done, k), source, target, j)
                    return []

                most = b.sub(waiting, done)
                puts = b.select(b.icmp_signed("<", most, steps), most, steps)
                ir.loop(puts, [], partial(step, True))
                ir.loop(b.sub(steps, puts), [], lambda k, _: step(False, b.add(k, puts), _))
                sums = ir.at(mine, ir.times(side, SUMS_BYTES))
                for half in range(together):
                    for j in range(VECTORS):
                        place = ir.at(sums, half * AMX_ROWS * ROW_BYTES + j * LINE)
                        store_tile(ir, half * VECTORS + j, place, I64(ROW_BYTES))
                return [b.add(done, puts)]

            (done,) = ir.loop(I64(2), [I64(0)], multiply)
            ir.loop(b.sub(waiting, done), [], lambda k, _: put_row(source, target, b.add(k, done), _))
            following = ir.at(target, b.mul(waiting, ldtarget))
            return [ir.times(count, together), mine, following]

        pairs = b.sdiv(rows, I64(BOTH))
        with b.if_then(b.icmp_signed(">", pairs, I64(0))):
            configure(ir, shapes(I64(AMX_ROWS)))
        carried = ir.loop(
            pairs,
            [waiting, room, target],
            lambda i, carried: some_rows(ir.times(i, BOTH), I64(AMX_ROWS), 2, ir.at(i, 1), carried),
        )
        whole = ir.times(pairs, BOTH)

        def the_rest(i, carried):
            first = ir.at(whole, ir.times(i, AMX_ROWS))
            left, most = b.sub(rows, first), I64(AMX_ROWS)
            count = b.select(b.icmp_signed("<", left, most), left, most)
            configure(ir, shapes(count))
            return some_rows(first, count, 1, ir.at(b.add(pairs, i), 1), carried)

        rests = b.sdiv(ir.at(b.sub(rows, whole), AMX_ROWS - 1), I64(AMX_ROWS))
        waiting, source, target = ir.loop(rests, carried, the_rest)
        ir.loop(waiting, [], partial(put_row, source, target))
        with b.if_then(b.icmp_signed(">", rows, I64(0))):
            tile_call(ir, "tilerelease")
        return context.get_dummy_value()

    return types.void(gelu, *[types.int64] * 10), codegen


@inner
def gated(gelu, waiting, rows, room, a, lda, gate, up, target, ldtarget, steps):
    """gated_tile as a function to be compiled on its own."""
    gated_tile(gelu, waiting, rows, room, a, lda, gate, up, target, ldtarget, steps)
