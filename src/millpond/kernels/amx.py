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
    ROW_BYTES,
    STEP_BITS,
    STEPS_AT,
    SUMS_BYTES,
    U4,
    U8,
    VECTORS,
    WEIGHT_POWER,
    ZERO_CODE,
    group_bytes,
    repeated,
    scales_at,
)
from millpond.kernels.simd import (
    I8,
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
        each, start = (repeated(ir, x, 2, 16 * half) for x in (each_of, starts))
        for eight in range(HALF // 8):
            raw = ir.load(V32I16, w_g, ((half * HALF // 8 + eight) * VECTORS + j) * LINE)
            for shift in NIBBLE_SHIFTS:
                place = b.lshr(raw, ir.const(V32I16, shift)) if shift else raw
                yield ir.call("llvm.fma.v32f16", V32F16, ir.look_up(table, place), each, start)


def _pairs_of_bytes(ir, w_g, j, scale):
    """The same of an 8-bit group."""
    b, scale = ir.b, repeated(ir, scale, 2)
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


def shapes(count):
    """Of sums of `count` rows each, of the rows and of the weights."""
    return [(count, LINE)] * (2 * VECTORS + 1) + [(I64(STEP // 2), LINE)]


def products(ir, together, a, lda, w, columns):
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


def spread(many, few):
    """Instructions with a few others spread evenly between them."""
    many = list(many)
    for n, each in enumerate(many):
        yield each
        yield from few[n * len(few) // len(many) : (n + 1) * len(few) // len(many)]


def ask(ir, row, last, c, ldc, j):
    """Ask for the line of c where the sums of a row will be written, or of the last row. Between the products one ask
    after the other is free; lines that nobody asked for are waited for at the end, and so are many asks at once."""
    row = ir.b.select(ir.b.icmp_signed("<", row, last), row, last)
    ir.prefetch(ir.at(c, ir.b.mul(row, ldc)), j * LINE, writes=True)


def store_sums(ir, together, c, ldc):
    """Put the sums of `together` times so many rows as are configured to c."""
    for i in range(together):
        for j in range(VECTORS):
            store_tile(ir, i * VECTORS + j, ir.at(c, ir.times(ldc, i * AMX_ROWS), j * LINE), ldc)


def _add_sums(ir, row, j, sums, c, ldc):
    """Add a vector of the sums that wait in a room to a row of c."""
    place = ir.at(c, ir.b.mul(row, ldc), j * LINE)
    x = ir.load(V16F32, ir.at(sums, ir.times(row, ROW_BYTES)), j * LINE)
    ir.store(ir.b.fadd(ir.load(V16F32, place), x), place)


def _add_rows(ir, first, count, sums, c, ldc):
    def add(r, _):
        for j in range(VECTORS):
            _add_sums(ir, ir.b.add(r, first), j, sums, c, ldc)
        return []

    ir.loop(count, [], add)


def in_blocks(ir, rows, carried, some_rows):
    """carried = some_rows(first, count, together, turn, carried) for 2 times 16 rows after 2 times 16, then for what is
    left, 16 (or fewer) after 16; the registers are configured for them. first, count, turn (0, 1, 2, ...): int64."""
    b, both = ir.b, 2 * AMX_ROWS
    pairs, most = b.sdiv(rows, I64(both)), I64(AMX_ROWS)
    with b.if_then(b.icmp_signed(">", pairs, I64(0))):
        configure(ir, shapes(most))
    carried = ir.loop(pairs, carried, lambda i, each: some_rows(ir.times(i, both), most, 2, i, each))
    whole = ir.times(pairs, both)

    def the_rest(i, carried):
        first = ir.at(whole, ir.times(i, AMX_ROWS))
        left = b.sub(rows, first)
        count = b.select(b.icmp_signed("<", left, most), left, most)
        configure(ir, shapes(count))
        return some_rows(first, count, 1, b.add(pairs, i), carried)

    carried = ir.loop(b.sdiv(ir.at(b.sub(rows, whole), AMX_ROWS - 1), most), carried, the_rest)
    tile_call(ir, "tilerelease")
    return carried


def in_steps(ir, steps, turns, some):
    """some(k, is_early) for k in range(steps), the first `turns` of them early; returns how many these were."""
    early = ir.b.select(ir.b.icmp_signed("<", turns, steps), turns, steps)
    ir.loop(early, [], lambda k, _: some(k, True) or [])
    ir.loop(ir.b.sub(steps, early), [], lambda k, _: some(ir.b.add(k, early), False) or [])
    return early


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
        last, adds, sums = b.sub(groups, I64(1)), b.icmp_signed("!=", add, I64(0)), room(ir, SUMS_BYTES)
        # a row's length from row to row is a room in the first cache: nothing to ask for
        last_row = b.select(b.icmp_signed("==", ldc, I64(ROW_BYTES)), I64(0), ir.at(ir.times(count, together_), -1))
        factor = b.fmul(ir.power_of_two(b.sub(I64(WEIGHT_POWER), power)), ir.const(V16F32, ROUND_UP))

        def group_at(g):
            return ir.at(unpacked, ir.times(b.and_(g, places), GROUP // 2 * PAIR_BYTES))

        def multiply(g, j):
            """products of a group and one vector of columns."""
            for step in range(GROUP // STEP):
                weights = ir.at(group_at(g), step * STEP // 2 * PAIR_BYTES)
                a_k = ir.at(a, ir.times(g, 2 * GROUP), step * 2 * STEP)
                yield from products(ir, together_, a_k, lda, weights, [j])

        def group(g, _):
            is_first = b.icmp_signed("==", g, I64(0))
            before = b.select(is_first, g, b.sub(g, I64(1)))
            for j in range(VECTORS):
                asks = [partial(ask, ir, ir.at(ir.times(g, 4), i), last_row, c, ldc, j) for i in range(4)]
                _unpack(ir, kind_, w, g, j, factor, group_at(g), list(spread(multiply(before, j), asks)))
            # Before the first there is none: its turn sums up what nobody wants, so that this code stands here once.
            with b.if_then(is_first):
                for register in range(together_ * VECTORS):
                    tile_call(ir, "tilezero", register)
            return []

        configure(ir, shapes(count))
        ir.loop(groups, [], group)
        for j in range(VECTORS):
            for instruction in multiply(last, j):
                instruction()
        with b.if_else(adds) as (then, otherwise):
            with then:
                store_sums(ir, together_, sums, I64(ROW_BYTES))
                _add_rows(ir, I64(0), ir.times(count, together_), sums, c, ldc)
            with otherwise:
                store_sums(ir, together_, c, ldc)
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
        adds, rooms = b.icmp_signed("!=", add, I64(0)), room(ir, 2 * SUMS_BYTES)

        def some_rows(first, count, together, turn, carried):
            """Between their products, the sums of the rows before are added, or lines are asked for."""
            waiting, sums, target = carried
            a_b, c_b, last_row = ir.at(a, b.mul(first, lda)), ir.at(c, b.mul(first, ldc)), ir.at(count, -1)
            if together == 2:
                last_row = ir.at(last_row, AMX_ROWS)

            def leave(row, j):
                with b.if_else(adds) as (then, otherwise):
                    with then:
                        _add_sums(ir, row, j, sums, target, ldc)
                    with otherwise:
                        ask(ir, row, last_row, c_b, ldc, j)

            def step(k, is_early):
                w_k, a_k = ir.at(w, ir.times(k, STEP // 2 * PAIR_BYTES)), ir.at(a_b, ir.times(k, 2 * STEP))
                leaves = [partial(leave, ir.at(ir.times(k, 2), i), j) for i in range(2) for j in range(VECTORS)]
                multiplied = products(ir, together, a_k, lda, w_k, range(VECTORS))
                for instruction in spread(multiplied, leaves if is_early else []):
                    instruction()

            for register in range(together * VECTORS):
                tile_call(ir, "tilezero", register)
            turns = b.select(adds, b.sdiv(waiting, I64(2)), I64(together * AMX_ROWS // 2))
            done = ir.times(in_steps(ir, steps, turns, step), 2)
            mine = ir.at(rooms, ir.times(b.and_(turn, I64(1)), SUMS_BYTES))
            _add_rows(ir, done, b.sub(waiting, done), sums, target, ldc)
            place, stride = (b.select(adds, *each) for each in ((mine, c_b), (I64(ROW_BYTES), ldc)))
            store_sums(ir, together, place, stride)
            return [b.select(adds, ir.times(count, together), I64(0)), mine, c_b]

        waiting, sums, target = in_blocks(ir, rows, [I64(0), rooms, c], some_rows)
        _add_rows(ir, I64(0), waiting, sums, target, ldc)
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
