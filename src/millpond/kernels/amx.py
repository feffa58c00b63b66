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
    ZERO_CODE,
    group_bytes,
    scales_at,
)
from millpond.kernels.simd import I8, I64, V16F32, V16I8, V16I16, V16I32, V64I8, Ir

PALETTE = 1
LINE_BYTES_AT, LINES_AT = 16, 48  # in a configuration: two bytes and one byte for each register
# A step along K: a line of a row, a pair of inputs of 16 columns in a line of the weights.
STEP = 32
PAIR_BYTES = COLUMNS * 4
# Two times 16 rows beside 48 columns: six sums, and one register each for rows and weights.
ROWS_TILE, WEIGHTS_TILE = 6, 7

# A float32 whose mantissa has an integer q in its midst is BIG + unit * q. Of 32 bits with 8 nibbles, shifted in four
# ways, two masks take two nibbles each: by how much to the left, and which of the 8 inputs these are.
NIBBLE_SHIFTS = ((0, (4, 3)), (8, (5, 0)), (-8, (7, 2)), (16, (6, 1)))
NIBBLE_MASKS, NIBBLE_UNITS = (0x0000F000, 0x000F0000), (2.0**12, 2.0**16)
BYTE_SHIFTS, BYTE_MASK, BYTE_UNIT = (15, 7, -1, -9), 0x007F8000, 2.0**15
BIG, BIG_BITS = 2.0**23, 0x4B000000
# Rounding to bfloat16 is cutting off, of weights that are larger by so much: on average, half of what is cut off. What
# is a bfloat16 already stays the same.
ROUND_UP = 1 + log(2) / 256


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


def _shifted(ir, x, by):
    """32 bits each, by so many to the left; 16 is a rotation."""
    b = ir.b
    if by == 16:
        return b.or_(b.shl(x, ir.const(V16I32, 16)), b.lshr(x, ir.const(V16I32, 16)))
    return b.shl(x, ir.const(V16I32, by)) if by > 0 else b.lshr(x, ir.const(V16I32, -by)) if by < 0 else x


def _big(ir, x, mask):
    """BIG + unit * q as float32, where q are the masked bits."""
    return ir.b.bitcast(ir.b.or_(ir.b.and_(x, ir.const(V16I32, mask)), ir.const(V16I32, BIG_BITS)), V16F32)


def _pairs_of_nibbles(ir, w_g, j, scale):
    """The weights of a group for a vector of columns, two inputs after two; float32."""
    b = ir.b
    for half in range(2):
        step = b.zext(ir.load(V16I16, w_g, STEPS_AT + (half * VECTORS + j) * 32), V16I32)
        base = b.zext(ir.load(V16I8, w_g, BASES_AT + (half * VECTORS + j) * 16), V16I32)
        is_whole = b.icmp_signed("==", b.and_(step, ir.const(V16I32, (1 << STEP_BITS) - 1)), ir.const(V16I32, 0))
        # where a step has a fraction, the integer tiles cut off a half on average, which the base makes up for
        zero = b.select(is_whole, ir.const(V16F32, -float(ZERO_CODE)), ir.const(V16F32, -ZERO_CODE - 0.5))
        start = b.fmul(scale, b.fadd(b.sitofp(base, V16F32), zero))
        each = b.fmul(scale, b.sitofp(step, V16F32))
        factors = [b.fmul(each, ir.const(V16F32, 2.0**-STEP_BITS / unit)) for unit in NIBBLE_UNITS]
        starts = [ir.fma(factor, ir.const(V16F32, -BIG), start) for factor in factors]
        for eight in range(HALF // 8):
            raw = ir.load(V16I32, w_g, ((half * HALF // 8 + eight) * VECTORS + j) * LINE)
            inputs = {}
            for shift, places in NIBBLE_SHIFTS:
                x = _shifted(ir, raw, shift)
                for k, mask, factor, first in zip(places, NIBBLE_MASKS, factors, starts, strict=True):
                    inputs[k] = ir.fma(_big(ir, x, mask), factor, first)
            for k in range(0, 8, 2):
                yield inputs[k], inputs[k + 1]


def _pairs_of_bytes(ir, w_g, j, scale):
    """The same of an 8-bit group."""
    factor = ir.b.fmul(scale, ir.const(V16F32, 1 / BYTE_UNIT))
    start = ir.b.fmul(scale, ir.const(V16F32, -BIG / BYTE_UNIT - ZERO_CODE))
    for four in range(GROUP // 4):
        raw = ir.load(V16I32, w_g, (four * VECTORS + j) * LINE)
        inputs = [ir.fma(_big(ir, _shifted(ir, raw, shift), BYTE_MASK), factor, start) for shift in BYTE_SHIFTS]
        yield from zip(inputs[::2], inputs[1::2], strict=True)


# Of a group of each kind of tile, two inputs after two.
INPUTS_OF = {U4: _pairs_of_nibbles, U8: _pairs_of_bytes}


def _cut(ir, even, odd):
    """Pairs of bfloat16, the lower halves of both floats cut off."""
    low = ir.b.lshr(ir.b.bitcast(even, V16I32), ir.const(V16I32, 16))
    return ir.b.or_(low, ir.b.and_(ir.b.bitcast(odd, V16I32), ir.const(V16I32, -65536)))


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
def first_rows_tile(typingctx, kind, together, count, add, a, lda, w, unpacked, places, c, ldc, groups):
    """C[0:together * count, 0:48] = (where add is 1, +=) A @ W for a U4 or U8 tile, whose groups become those of a BF16
    tile at `unpacked`. Addresses, strides in bytes; the first two literal.

    count: 16 where together is 2, else 1 to 16. places: -1 where that tile is to be left; 1 where there is no need, so
    that two groups have room, in turns, which stays in the first cache.
    """
    kind_, together_ = kind.literal_value, together.literal_value

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder, AVX512), builder
        count, add, a, lda, w, unpacked, places, c, ldc, groups = args[2:]
        last = b.sub(groups, I64(1))

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
                _unpack(ir, kind_, w, g, j, group_at(g), list(multiply(before, j)))
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
        adds = b.icmp_signed("!=", add, I64(0))
        is_room = b.and_(b.icmp_signed("==", ldc, I64(COLUMNS * 4)), b.not_(adds))
        with b.if_else(is_room) as (then, otherwise):
            with then:
                for half in range(together_):
                    for j in range(VECTORS):
                        store_tile(ir, half * VECTORS + j, ir.at(c, half * AMX_ROWS * COLUMNS * 4 + j * LINE), ldc)
            with otherwise:
                _leave(ir, together_, count, adds, c, ldc)
        tile_call(ir, "tilerelease")
        return context.get_dummy_value()

    return types.void(kind, together, *[types.int64] * 10), codegen


def _unpack(ir, kind, w, g, j, target, between):
    """A group of a tile for a vector of columns, to its place in bfloat16. between: instructions to be called on the
    way, spread evenly, so that the units that they wait for are busy while others unpack."""
    num_bytes, pairs = group_bytes.py_func(kind), GROUP // 2
    w_g, lines, inputs = ir.at(w, ir.times(g, num_bytes)), num_bytes // LINE, INPUTS_OF[kind]
    scale = ir.half_to_float(ir.load(V16I16, w_g, scales_at(kind) + 32 * j))
    scale = ir.b.fmul(scale, ir.const(V16F32, ROUND_UP))
    for line in range(j * lines // VECTORS, (j + 1) * lines // VECTORS):
        ir.prefetch(w_g, AHEAD + line * LINE)
    for pair, (even, odd) in enumerate(inputs(ir, w_g, j, scale)):
        ir.store(_cut(ir, even, odd), target, pair * PAIR_BYTES + j * LINE)
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
        rooms = room(ir, 2 * both * COLUMNS * 4)

        def put(row, j, source, target):
            """A vector of the row that waits."""
            place = ir.at(target, b.mul(row, ldc), j * LINE)
            x = ir.load(V16F32, ir.at(source, ir.times(row, COLUMNS * 4)), j * LINE)
            with b.if_else(adds) as (then, otherwise):
                with then:
                    ir.store(b.fadd(ir.load(V16F32, place), x), place)
                with otherwise:
                    ir.store(x, place)

        def multiply(first, together, waiting, source, target):
            for register in range(together * VECTORS):
                tile_call(ir, "tilezero", register)
            a_b = ir.at(a, b.mul(first, lda))

            def step(puts, k, _):
                w_k, some = ir.at(w, ir.times(k, STEP // 2 * PAIR_BYTES)), list(puts)
                for n, instruction in enumerate(products(ir, together, ir.at(a_b, ir.times(k, 2 * STEP)), lda, w_k, range(VECTORS))):
                    instruction()
                    if instruction.args[1] == "tdpbf16ps" and some:
                        i, j = some.pop(0)
                        put(ir.at(ir.times(k, 2), i), j, source, target)
                for i, j in some:
                    put(ir.at(ir.times(k, 2), i), j, source, target)
                return []

            puts = [(i, j) for i in range(2) for j in range(VECTORS)]
            begun = b.select(b.icmp_signed("<", waiting, steps), waiting, steps)
            ir.loop(begun, [], lambda k, _: step(puts, k, _))
            ir.loop(b.sub(steps, begun), [], lambda k, _: step([], b.add(k, begun), _))
            def the_rest(k, _):
                for i, j in puts:
                    put(ir.at(ir.times(b.add(k, begun), 2), i), j, source, target)
                return []
            ir.loop(b.sub(waiting, begun), [], the_rest)

        pairs = b.sdiv(rows, I64(both))

        def pair(i, carried):
            waiting, source, target = carried
            mine = ir.at(rooms, ir.times(b.and_(i, I64(1)), both * COLUMNS * 4))
            multiply(ir.times(i, both), 2, waiting, source, target)
            for h in range(2):
                for j in range(VECTORS):
                    store_tile(ir, h * VECTORS + j, ir.at(mine, h * AMX_ROWS * COLUMNS * 4 + j * LINE), I64(COLUMNS * 4))
            return [I64(AMX_ROWS), mine, ir.at(c, b.mul(ir.times(i, both), ldc))]

        with b.if_then(b.icmp_signed(">", pairs, I64(0))):
            configure(ir, shapes(I64(AMX_ROWS)))
        waiting, source, target = ir.loop(pairs, [I64(0), rooms, c], pair)
        whole = ir.times(pairs, both)

        def the_rest(i, carried):
            waiting, source, target = carried
            first = ir.at(whole, ir.times(i, AMX_ROWS))
            left, most = b.sub(rows, first), I64(AMX_ROWS)
            count = b.select(b.icmp_signed("<", left, most), left, most)
            configure(ir, shapes(count))
            multiply(first, 1, waiting, source, target)
            _leave(ir, 1, count, adds, ir.at(c, b.mul(first, ldc)), ldc)
            return [I64(0), source, target]

        waiting, _, _ = ir.loop(b.sdiv(ir.at(b.sub(rows, whole), AMX_ROWS - 1), I64(AMX_ROWS)), [waiting, source, target], the_rest)

        def flush(k, _):
            for i in range(2):
                for j in range(VECTORS):
                    put(ir.at(ir.times(k, 2), i), j, source, target)
            return []
        ir.loop(waiting, [], flush)
        tile_call(ir, "tilerelease")
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@inner
def first_rows(kind, together, count, add, a, lda, w, unpacked, places, c, ldc, groups):
    """first_rows_tile as a function to be compiled on its own, once for each (kind, together)."""
    first_rows_tile(kind, together, count, add, a, lda, w, unpacked, places, c, ldc, groups)


@inner
def more_rows(rows, add, a, lda, w, c, ldc, steps):
    """rows_tile as a function to be compiled on its own."""
    rows_tile(rows, add, a, lda, w, c, ldc, steps)
