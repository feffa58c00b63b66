"""Gate and up by AMX, rows after the first: activation(gate) * up, as bfloat16, the input of the down projection.

The sums of gate and of up meet in a room that stays in the first cache, and what becomes of them is computed between
the products of the next rows: the units for vectors have little else to do there.
"""

from functools import partial

from llvmlite.ir import Constant
from numba import types
from numba.extending import intrinsic

from millpond.kernels.amx import PAIR_BYTES, STEP, in_blocks, in_steps, products, spread, store_sums, tile_call
from millpond.kernels.isa import AVX512
from millpond.kernels.jit import inner
from millpond.kernels.matmul import LINE, PAIR_ORDER, ROW_BYTES, SUMS_BYTES, VECTORS
from millpond.kernels.pointwise import gelu_by_tanh, silu
from millpond.kernels.simd import I64, V16F32, V16I16, Ir

# What becomes of gate, by name.
GATES = {"silu": 0, "gelu": 1}
ACTIVATIONS = (silu, gelu_by_tanh)


@intrinsic(prefer_literal=True)
def gated_tile(typingctx, gate_by, waiting, rows, room, a, lda, gate, up, target, ldtarget, steps, in_pairs, power):
    """target[0:waiting + rows, 0:48] = activation(A @ gate) * (A @ up), bfloat16, for two BF16 tiles of 48 columns.
    Addresses, strides in bytes; gate_by: of GATES, literal. power: by 2 ** which the result is made larger; in_pairs: 1
    where each 16 are to be in PAIR_ORDER, as pointwise.py's round_for_amx does.

    waiting: the first so many rows (up to 32) have been multiplied: their sums are at `room`, those of up SUMS_BYTES
    behind those of gate, ROW_BYTES from row to row. a: of the rows after these. room: of 4 * SUMS_BYTES.
    """
    activation = ACTIVATIONS[gate_by.literal_value]

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        waiting, rows, room, a, lda, gate, up, target, ldtarget, steps, in_pairs, power = args[1:]

        factor = ir.power_of_two(power)
        orders = (Constant(V16I16, order) for order in (PAIR_ORDER, list(range(16))))
        order = b.select(b.icmp_signed("!=", in_pairs, I64(0)), *orders)

        def put(row, sums, target, j):
            """A vector of a row that waits."""
            sums = ir.at(sums, ir.times(row, ROW_BYTES))
            x, u = (ir.load(V16F32, sums, each + j * LINE) for each in (0, SUMS_BYTES))
            value = ir.to_bf16(b.fmul(b.fmul(activation(ir, x), u), factor))
            value = ir.call("llvm.x86.avx512.permvar.hi.256", V16I16, value, order)
            ir.store(value, ir.at(target, b.mul(row, ldtarget)), j * LINE // 2)

        def put_rows(first, count, sums, target):
            def put_row(r, _):
                for j in range(VECTORS):
                    put(b.add(r, first), sums, target, j)
                return []

            ir.loop(count, [], put_row)

        def some_rows(first, count, together, turn, carried):
            """Between their products, the rows before are put."""
            waiting, sums, target = carried
            a_b, mine = (
                ir.at(a, b.mul(first, lda)),
                ir.at(room, ir.times(b.and_(ir.at(turn, 1), I64(1)), 2 * SUMS_BYTES)),
            )

            def multiply(side, carried):
                (done,), w = carried, b.select(b.icmp_signed("==", side, I64(0)), gate, up)

                def step(k, is_early):
                    w_k, a_k = ir.at(w, ir.times(k, STEP // 2 * PAIR_BYTES)), ir.at(a_b, ir.times(k, 2 * STEP))
                    puts = [partial(put, b.add(done, k), sums, target, j) for j in range(VECTORS)]
                    multiplied = products(ir, together, a_k, lda, w_k, range(VECTORS))
                    for instruction in spread(multiplied, puts if is_early else []):
                        instruction()

                for register in range(together * VECTORS):
                    tile_call(ir, "tilezero", register)
                early = in_steps(ir, steps, b.sub(waiting, done), step)
                store_sums(ir, together, ir.at(mine, ir.times(side, SUMS_BYTES)), I64(ROW_BYTES))
                return [b.add(done, early)]

            (done,) = ir.loop(I64(2), [I64(0)], multiply)
            put_rows(done, b.sub(waiting, done), sums, target)
            return [ir.times(count, together), mine, ir.at(target, b.mul(waiting, ldtarget))]

        waiting, sums, target = in_blocks(ir, rows, [waiting, room, target], some_rows)
        put_rows(I64(0), waiting, sums, target)
        return context.get_dummy_value()

    return types.void(gate_by, *[types.int64] * 12), codegen


@inner
def gated(gate_by, waiting, rows, room, a, lda, gate, up, target, ldtarget, steps, in_pairs, power):
    """gated_tile as a function to be compiled on its own, for one of GATES."""
    gated_tile(gate_by, waiting, rows, room, a, lda, gate, up, target, ldtarget, steps, in_pairs, power)
