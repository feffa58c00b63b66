"""Linear layers of integers by AMX: the products of 16 rows, 16 columns and a group of 64 inputs in one instruction.

The sums are those of the other tiles, whole numbers, and what follows them is the same operations in the same order:
the bits are the same.
"""

from llvmlite.ir import Constant, FunctionType, VoidType
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from millpond.kernels.isa import AVX512
from millpond.kernels.jit import inner
from millpond.kernels.matmul import (
    AMX_ROWS,
    GROUP,
    LINE,
    U8_BYTES,
    U8_SCALES_AT,
    VECTORS,
    ZERO_CODE,
    add_outliers,
    group_bytes,
    group_codes,
    scales_at,
)
from millpond.kernels.simd import F32, I8, I64, V16F32, V16I16, V16I32, V64I8, Ir

# What AMX takes is a signed tile: a U8 tile whose codes count from 0 instead of 128. The 64 inputs of its 16 columns
# are an operand as they stand, one line for each four inputs.
#
# Eight registers hold a tile each, and no two groups in a row use the same ones, so that one group's products are
# summed while the sums of the group before are scaled. The sums start from a line of zeros in memory: clearing a
# register takes the unit that multiplies as long as a product does.
ROW_TILES, WEIGHT_TILES, SUM_TILES = (0, 1), (2, 3), (4, 5)
SUM_BYTES = AMX_ROWS * LINE
PALETTE = 1
ROWS_TOGETHER = 4  # are scaled before the next ones
LINE_BYTES_AT, LINES_AT = 16, 48  # in a configuration: two bytes and one byte for each register


def tile_call(ir, name, *arguments):
    """An instruction of AMX; a register is a number, an address an integer."""
    ir.call(f"llvm.x86.{name}", VoidType(), *(I8(x) if isinstance(x, int) else x for x in arguments))


def load_tile(ir, register, address, stride):
    tile_call(ir, "tileloadd64", register, ir.b.inttoptr(address, I8.as_pointer()), stride)


def room(ir, num_bytes):
    """The address of so many bytes of the stack, on a cache line."""
    place = cgutils.alloca_once(ir.b, I8, num_bytes)
    place.align = LINE
    return ir.b.ptrtoint(place, I64)


def _hidden(ir, address):
    """An address that LLVM does not see through: it would keep one for each row, more than there are registers."""
    return ir.b.asm(FunctionType(I64, [I64]), "", "=r,0", [address], side_effect=False)


def store_tile(ir, register, address, stride):
    tile_call(ir, "tilestored64", register, ir.b.inttoptr(address, I8.as_pointer()), stride)


def configure(ir, shapes):
    """Give the registers, from the first on, so many lines (int64) of so many bytes."""
    config = bytearray(64)
    config[0] = PALETTE
    for register, (_, num_bytes) in enumerate(shapes):
        config[LINE_BYTES_AT + 2 * register] = num_bytes
    place = room(ir, LINE)
    ir.store(Constant(V64I8, list(config)), place)
    for register, (lines, _) in enumerate(shapes):
        ir.store(ir.b.trunc(lines, I8), place, LINES_AT + register)
    tile_call(ir, "ldtilecfg", ir.b.inttoptr(place, I8.as_pointer()))


@intrinsic(prefer_literal=True)
def signed_tile(typingctx, kind, w, groups, signed):
    """Leave a U4 or U8 tile of so many groups as a signed tile; addresses."""
    kind_ = kind.literal_value

    def codegen(context, builder, signature, args):
        ir, (w, groups, signed) = Ir(builder, AVX512), args[1:]
        sign = ir.const(V64I8, -ZERO_CODE)

        def group(g, _):
            w_g = ir.at(w, ir.times(g, group_bytes.py_func(kind_)))
            signed_g = ir.at(signed, ir.times(g, U8_BYTES))
            for k, codes in enumerate(group_codes(ir, kind_, w_g, range(VECTORS))):
                for j, x in enumerate(codes):
                    ir.store(builder.xor(x, sign), signed_g, (k * VECTORS + j) * LINE)
            for j in range(VECTORS):
                ir.store(ir.load(V16I16, w_g, scales_at(kind_) + 32 * j), signed_g, U8_SCALES_AT + 32 * j)
            return []

        ir.loop(groups, [], group)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), codegen


@intrinsic
def many_rows_tile(
    typingctx, rows, add, a, lda, w, sums, ldsums, outliers, outlier_count, c, ldc, groups, near, near_count
):
    """What matmul.gemm_tile does, for a signed tile and any number of rows from AMX_ROWS on.

    The last rows go through together with as many of those before them as make AMX_ROWS, whose results are there
    already and stay. near_count: cache lines to fetch, from `near` on, with each AMX_ROWS.
    """

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        rows, add, a, lda, w, sums, lds, outliers, outlier_count, c, ldc, groups, near, near_count = args
        adds = b.icmp_signed("!=", add, I64(0))
        configure(ir, [(I64(AMX_ROWS), LINE)] * 8)
        zeros, place = room(ir, LINE), room(ir, len(SUM_TILES) * SUM_BYTES)
        ir.store(ir.const(V16I32, 0), zeros)
        last_group = b.sub(groups, I64(1))
        passes = ir.times(groups, VECTORS)
        near_each = b.sdiv(ir.at(near_count, b.sub(passes, I64(1))), passes)

        def products(a, w, g, turn):
            """Sum the products of a group (or the last one again, beyond the end) and leave them in their place."""
            g = b.select(b.icmp_signed("<", g, last_group), g, last_group)
            row_tile, weight_tile, sum_tile = ROW_TILES[turn], WEIGHT_TILES[turn], SUM_TILES[turn]
            load_tile(ir, weight_tile, ir.at(w, ir.times(g, U8_BYTES)), I64(VECTORS * LINE))
            load_tile(ir, row_tile, ir.at(a, ir.times(g, GROUP)), lda)
            load_tile(ir, sum_tile, zeros, I64(0))
            tile_call(ir, "tdpbssd", sum_tile, row_tile, weight_tile)
            store_tile(ir, sum_tile, ir.at(place, turn * SUM_BYTES), I64(LINE))

        def scaled(sums, scales, g, turn, acc):
            """The accumulated sums of all rows with those of a group from their place."""
            scale = ir.half_to_float(ir.load(V16I16, ir.at(scales, ir.times(g, U8_BYTES))))
            result = []
            for r, before in enumerate(acc):
                if r % ROWS_TOGETHER == 0:
                    ir.in_place()
                    here = _hidden(ir, ir.at(sums, b.mul(lds, I64(r)), ir.times(g, 8)))
                dot = ir.load(V16I32, place, turn * SUM_BYTES + r * LINE)
                s = ir.load_splat(F32, ir.at(here, b.mul(lds, I64(r % ROWS_TOGETHER))))
                result.append(ir.fma(b.fmul(b.sitofp(dot, V16F32), s), scale, before))
            return result

        def some_rows(block, _):
            wanted, most = ir.times(block, AMX_ROWS), b.sub(rows, I64(AMX_ROWS))
            first = b.select(b.icmp_signed("<", wanted, most), wanted, most)
            a_b, sums_b, c_b = (ir.at(x, b.mul(first, ld)) for x, ld in ((a, lda), (sums, lds), (c, ldc)))
            there = b.sub(wanted, first)  # so many rows are there
            near_b = ir.at(near, ir.times(b.mul(block, near_count), LINE))

            def some_columns(j, _):
                w_j, scales = ir.at(w, ir.times(j, LINE)), ir.at(w, ir.times(j, LINE // 2), U8_SCALES_AT)
                c_rows = [ir.at(c_b, ir.times(j, LINE), b.mul(ldc, I64(r))) for r in range(AMX_ROWS)]
                near_j = ir.at(near_b, ir.times(b.mul(b.mul(j, groups), near_each), LINE))
                for each in c_rows:
                    ir.prefetch(each)

                def two_groups(pair, acc):
                    start = ir.at(near_j, ir.times(b.mul(pair, near_each), 2 * LINE))
                    ir.loop(
                        ir.times(near_each, 2),
                        [],
                        lambda i, _: ir.prefetch(ir.at(start, ir.times(i, LINE)), near=2) or [],
                    )
                    g = ir.times(pair, 2)
                    products(a_b, w_j, ir.at(g, 1), 1)
                    acc = scaled(sums_b, scales, g, 0, acc)
                    products(a_b, w_j, ir.at(g, 2), 0)
                    return scaled(sums_b, scales, ir.at(g, 1), 1, acc)

                products(a_b, w_j, I64(0), 0)
                acc = ir.loop(b.ashr(groups, I64(1)), [ir.zero()] * AMX_ROWS, two_groups)
                odd = b.and_(groups, I64(1))
                acc = ir.loop(odd, acc, lambda _, acc: scaled(sums_b, scales, last_group, 0, acc))
                values = ir.at(sums_b, ir.times(groups, 8))
                acc = add_outliers(ir, acc, 1, values, lds, ir.at(outliers, ir.times(j, LINE)), outlier_count)
                for r, (at, value) in enumerate(zip(c_rows, acc, strict=True)):
                    with b.if_then(b.icmp_signed("<=", there, I64(r))), b.if_else(adds) as (then, otherwise):
                        with then:
                            ir.store(b.fadd(ir.load(V16F32, at), value), at)
                        with otherwise:
                            ir.store(value, at)
                return []

            ir.loop(I64(VECTORS), [], some_columns)
            return []

        ir.loop(b.sdiv(ir.at(rows, AMX_ROWS - 1), I64(AMX_ROWS)), [], some_rows)
        tile_call(ir, "tilerelease")
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14), codegen


@inner
def make_signed(kind, w, groups, signed):
    """signed_tile as a function to be compiled on its own, once for each kind."""
    signed_tile(kind, w, groups, signed)


@inner
def many_rows(rows, add, a, lda, w, sums, ldsums, outliers, outlier_count, c, ldc, groups, near, near_count):
    """many_rows_tile as a function to be compiled on its own."""
    many_rows_tile(rows, add, a, lda, w, sums, ldsums, outliers, outlier_count, c, ldc, groups, near, near_count)
