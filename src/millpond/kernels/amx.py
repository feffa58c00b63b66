"""Linear layers by AMX: the products of 16 rows, 16 columns and 32 inputs in one instruction, bfloat16 both.

A tile of integer weights becomes bfloat16, its scales included, as the first rows go through; rows stay bfloat16, and
a sum stays in AMX's registers along all of K. A row's products are summed up in the same order whatever rows are beside
it, so one row goes through as many do.
"""

from functools import partial
from math import log

from llvmlite.ir import Constant, VoidType
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from millpond.kernels.isa import AVX512
from millpond.kernels.jit import inner
from millpond.kernels.matmul import (
    AHEAD,
    AMX_ROWS,
    BASES_AT,
    COLUMNS,
    GROUP,
    HALF,
    LINE,
    STEP_BITS,
    STEPS_AT,
    U4,
    U8,
    VECTORS,
    WEIGHT_POWER,
    ZERO_CODE,
    group_bytes,
    scales_at,
    spread,
)
from millpond.kernels.simd import (
    F32,
    FLOAT_BIAS,
    FLOAT_MANTISSA,
    I8,
    I32,
    I64,
    V16F16,
    V16F32,
    V16I8,
    V16I16,
    V32F16,
    V32I16,
    V64I8,
    Ir,
)

PALETTE = 1
LINE_BYTES_AT, LINES_AT = 16, 48  # in a configuration: two bytes and one byte for each register
# A step along K: a line of a row, a pair of inputs of 16 columns in a line of the weights.
STEP = 32
PAIR_BYTES = COLUMNS * 4
# Two times 16 rows beside 48 columns: six sums, and one register each for rows and weights.
ROWS_TILE, WEIGHTS_TILE = 6, 7

# Weights are made in float16, which has 3 bits more than bfloat16. Rounding is cutting these off, of weights that are
# larger by so much: on average, what is cut off. What is a bfloat16 already stays the same.
ROUND_UP = 1 + log(2) / 256 * 7 / 8
# By how much 16 bits with 4 nibbles go to the right for the inputs 0, 1, 4 and 5 of 8, those 2 further on being beside
# them. The lookup sees the lowest 5 bits alone.
NIBBLE_SHIFTS = (8, 0, 12, 4)
NIBBLES = [float(i % 16) for i in range(32)]
THOUSAND, THOUSAND_BITS = 1024.0, 0x6400  # a float16 whose mantissa is an integer
# The bits of a float16 as those of a bfloat16: the last ones cut off, 3 more in front of the exponent, which has 5 and
# counts from another bias; 2 ** WEIGHT_POWER less. Half of float16's least normal number takes the place of 0, 2 ** -15
# where a layer's largest scale is 2 ** 7 at least and its largest weight about 2 ** 14. So a weight is wrong by at most
# 2 ** -29 times that one.
CUT_BITS, KEPT_BITS, EXPONENT_BITS = 3, -0x7001, 0x3000


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


def _pairs_of_nibbles(ir, w_g, j, scale):
    """The weights of a group for a vector of columns, two inputs after two; float16."""
    b, table = ir.b, Constant(V32F16, NIBBLES)
    steps = ir.joined(*(ir.load(V16I16, w_g, STEPS_AT + (half * VECTORS + j) * 32) for half in range(2)))
    bases = ir.joined(*(ir.load(V16I8, w_g, BASES_AT + (half * VECTORS + j) * 16) for half in range(2)))
    is_whole = b.icmp_signed("==", b.and_(steps, ir.const(V32I16, (1 << STEP_BITS) - 1)), ir.const(V32I16, 0))
    # where a step has a fraction, the integer tiles cut off a half on average, which the base makes up for
    zeros = b.select(is_whole, ir.const(V32F16, float(ZERO_CODE)), ir.const(V32F16, ZERO_CODE + 0.5))
    scales = ir.joined(scale, scale)
    starts = b.fmul(scales, b.fsub(b.uitofp(b.zext(bases, V32I16), V32F16), zeros))
    each_of = b.fmul(scales, b.fmul(b.uitofp(steps, V32F16), ir.const(V32F16, 2.0**-STEP_BITS)))
    for half in range(2):
        each, start = (spread(ir, x, 2, 16 * half) for x in (each_of, starts))
        for eight in range(HALF // 8):
            raw = ir.load(V32I16, w_g, ((half * HALF // 8 + eight) * VECTORS + j) * LINE)
            for shift in NIBBLE_SHIFTS:
                place = b.lshr(raw, ir.const(V32I16, shift)) if shift else raw
                yield ir.call("llvm.fma.v32f16", V32F16, ir.look_up(table, place), each, start)


def _pairs_of_bytes(ir, w_g, j, scale):
    """The same of an 8-bit group."""
    b, scale = ir.b, spread(ir, scale, 2)
    for four in range(GROUP // 4):
        raw = ir.load(V32I16, w_g, (four * VECTORS + j) * LINE)
        for place in (b.and_(raw, ir.const(V32I16, 0xFF)), b.lshr(raw, ir.const(V32I16, 8))):
            code = b.bitcast(b.or_(place, ir.const(V32I16, THOUSAND_BITS)), V32F16)
            yield b.fmul(b.fsub(code, ir.const(V32F16, THOUSAND + ZERO_CODE)), scale)


# Of a group of each kind of tile, two inputs after two, in PAIR_ORDER.
INPUTS_OF = {U4: _pairs_of_nibbles, U8: _pairs_of_bytes}


def _cut(ir, weights):
    """float16 to bfloat16 of 2**-WEIGHT_POWER times as much, cutting."""
    b, bits = ir.b, ir.b.ashr(ir.b.bitcast(weights, V32I16), ir.const(V32I16, CUT_BITS))
    return b.or_(b.and_(bits, ir.const(V32I16, KEPT_BITS)), ir.const(V32I16, EXPONENT_BITS))


def _shapes(count):
    """Of sums of `count` rows each, of the rows and of the weights."""
    return [(count, LINE)] * (2 * VECTORS + 1) + [(I64(STEP // 2), LINE)]


def _products(ir, together, a, lda, w, columns):
    """What sums the products of 32 inputs, `together` times 16 rows (or fewer, as configured) and some vectors of
    columns: instructions, to be called in order. From one vector to the next, the last rows stay where they are."""
    held = None
    for turn, j in enumerate(columns):
        yield partial(load_tile, ir, WEIGHTS_TILE, ir.at(w, j * LINE), I64(PAIR_BYTES))
        for i in range(together)[:: -1 if turn % 2 else 1]:
            if i != held:
                yield partial(load_tile, ir, ROWS_TILE, ir.at(a, ir.times(lda, i * AMX_ROWS)), lda)
            yield partial(tile_call, ir, "tdpbf16ps", i * VECTORS + j, ROWS_TILE, WEIGHTS_TILE)
            held = i


def _leave(ir, together, count, adds, c, ldc):
    """Put the sums of `together` times `count` rows to c, or add them to what is there."""
    b, row_bytes = ir.b, COLUMNS * 4
    place = room(ir, 2 * AMX_ROWS * row_bytes)
    tiles = [(i, j) for i in range(together) for j in range(VECTORS)]

    def put_row(r, _):
        source, target = ir.at(place, ir.times(r, row_bytes)), ir.at(c, b.mul(r, ldc))
        sums = [ir.load(V16F32, source, j * LINE) for j in range(VECTORS)]
        with b.if_else(adds) as (then, otherwise):
            with then:
                for j, x in enumerate(sums):
                    ir.store(b.fadd(ir.load(V16F32, target, j * LINE), x), target, j * LINE)
            with otherwise:
                for j, x in enumerate(sums):
                    ir.store(x, target, j * LINE)
        return []

    for i, j in tiles:
        store_tile(ir, i * VECTORS + j, ir.at(place, i * AMX_ROWS * row_bytes + j * LINE), I64(row_bytes))
    ir.loop(ir.times(count, together), [], put_row)


@intrinsic(prefer_literal=True)
def first_rows_tile(typingctx, kind, together, count, add, a, lda, w, unpacked, places, c, ldc, groups, power):
    """C[0:together * count, 0:48] = (where add is 1, +=) A @ W for a U4 or U8 tile, whose groups become those of a BF16
    tile at `unpacked`. Addresses, strides in bytes; the first two literal.

    count: 16 where together is 2, else 1 to 16. places: -1 where that tile is to be left; 1 where there is no need, so
    that two groups have room, in turns, which stays in the first cache. power: the layer's.
    """
    kind_, together_ = kind.literal_value, together.literal_value

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        count, add, a, lda, w, unpacked, places, c, ldc, groups, power = args[2:]
        last = b.sub(groups, I64(1))
        bits = b.shl(b.sub(I64(FLOAT_BIAS + WEIGHT_POWER), power), I64(FLOAT_MANTISSA))
        factor = b.fmul(ir.splat(b.bitcast(b.trunc(bits, I32), F32)), ir.const(V16F32, ROUND_UP))

        def group_at(g):
            return ir.at(unpacked, ir.times(b.and_(g, places), GROUP // 2 * PAIR_BYTES))

        def multiply(g, j):
            """_products of a group and one vector of columns."""
            for step in range(GROUP // STEP):
                weights = ir.at(group_at(g), step * STEP // 2 * PAIR_BYTES)
                a_k = ir.at(a, ir.times(g, 2 * GROUP), step * 2 * STEP)
                yield from _products(ir, together_, a_k, lda, weights, [j])

        def group(g, _):
            is_first = b.icmp_signed("==", g, I64(0))
            before = b.select(is_first, g, b.sub(g, I64(1)))
            for j in range(VECTORS):
                _unpack(ir, kind_, w, g, j, factor, group_at(g), list(multiply(before, j)))
            # Before the first there is none: its turn sums up what nobody wants, so that this code stands here once.
            with b.if_then(is_first):
                for register in range(together_ * VECTORS):
                    tile_call(ir, "tilezero", register)
            return []

        configure(ir, _shapes(count))
        ir.loop(groups, [], group)
        for j in range(VECTORS):
            for instruction in multiply(last, j):
                instruction()
        _leave(ir, together_, count, b.icmp_signed("!=", add, I64(0)), c, ldc)
        tile_call(ir, "tilerelease")
        return context.get_dummy_value()

    return types.void(kind, together, *[types.int64] * 11), codegen


def _unpack(ir, kind, w, g, j, factor, target, between):
    """A group of a tile for a vector of columns, `factor` times as large in float16, to its place in bfloat16. between:
    instructions to be called on the way, spread evenly, so that the units that they wait for are busy while others
    unpack."""
    num_bytes, pairs = group_bytes.py_func(kind), GROUP // 2
    w_g, lines, inputs = ir.at(w, ir.times(g, num_bytes)), num_bytes // LINE, INPUTS_OF[kind]
    scale = ir.b.fmul(ir.half_to_float(ir.load(V16I16, w_g, scales_at(kind) + 32 * j)), factor)
    scale = ir.b.fptrunc(scale, V16F16)
    for line in range(j * lines // VECTORS, (j + 1) * lines // VECTORS):
        ir.prefetch(w_g, AHEAD + line * LINE)
    for pair, weights in enumerate(inputs(ir, w_g, j, scale)):
        ir.store(_cut(ir, weights), target, pair * PAIR_BYTES + j * LINE)
        for instruction in between[pair * len(between) // pairs : (pair + 1) * len(between) // pairs]:
            ir.in_place()
            instruction()


@intrinsic
def rows_tile(typingctx, rows, add, a, lda, w, c, ldc, steps):
    """C[0:rows, 0:48] = (where add is 1, +=) A @ W for one BF16 tile. Addresses, strides in bytes.

    a: bfloat16 [rows][K]. steps: of 32 inputs.
    """

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        rows, add, a, lda, w, c, ldc, steps = args
        adds, both = b.icmp_signed("!=", add, I64(0)), 2 * AMX_ROWS

        def some_rows(first, count, together):
            for register in range(together * VECTORS):
                tile_call(ir, "tilezero", register)
            a_b = ir.at(a, b.mul(first, lda))

            def step(k, _):
                w_k = ir.at(w, ir.times(k, STEP // 2 * PAIR_BYTES))
                for instruction in _products(ir, together, ir.at(a_b, ir.times(k, 2 * STEP)), lda, w_k, range(VECTORS)):
                    instruction()
                return []

            ir.loop(steps, [], step)
            _leave(ir, together, count, adds, ir.at(c, b.mul(first, ldc)), ldc)
            return []

        pairs = b.sdiv(rows, I64(both))
        with b.if_then(b.icmp_signed(">", pairs, I64(0))):
            configure(ir, _shapes(I64(AMX_ROWS)))
            ir.loop(pairs, [], lambda i, _: some_rows(ir.times(i, both), I64(AMX_ROWS), 2))
        whole = ir.times(pairs, both)

        def the_rest(i, _):
            first = ir.at(whole, ir.times(i, AMX_ROWS))
            left, most = b.sub(rows, first), I64(AMX_ROWS)
            count = b.select(b.icmp_signed("<", left, most), left, most)
            configure(ir, _shapes(count))
            return some_rows(first, count, 1)

        ir.loop(b.sdiv(ir.at(b.sub(rows, whole), AMX_ROWS - 1), I64(AMX_ROWS)), [], the_rest)
        tile_call(ir, "tilerelease")
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@inner
def first_rows(kind, together, count, add, a, lda, w, unpacked, places, c, ldc, groups, power):
    """first_rows_tile as a function to be compiled on its own, once for each (kind, together)."""
    first_rows_tile(kind, together, count, add, a, lda, w, unpacked, places, c, ldc, groups, power)


@inner
def more_rows(rows, add, a, lda, w, c, ldc, steps):
    """rows_tile as a function to be compiled on its own."""
    rows_tile(rows, add, a, lda, w, c, ldc, steps)
