"""Linear layers: C[r, n] = sum over k of A[r, k] * W[n, k], in tiles of 4 rows by 48 columns.

A weight matrix is cut along N into tiles of 48 columns and along K into groups of 64. U4 and U8 stand for integers
from -127 to 127 times a float16 scale for each (column, group), and meet signed 8-bit activations with a float32 scale
for each (row, group); BF16 and F32 are what their names say. AMX makes bfloat16 of U4 and U8 (amx.py).
"""

from functools import partial

import numpy as np
from llvmlite.ir import Constant, Undefined
from numba import types
from numba.extending import intrinsic

from millpond.kernels.jit import compiled, inner, merged
from millpond.kernels.link import call
from millpond.kernels.simd import F32, I32, I64, V16F32, V16I8, V16I16, V16I32, V32I16, V64I8, Ir, address, vector
from millpond.kernels.threads import shared_items

# In a tile, all bytes for a few k stand side by side for the 48 columns, so that one load feeds 16 lanes:
#
#     U4    [K/64] of U4_GROUP: in four bytes, 8 k of a column
#     U8    [K/64] of U8_GROUP: in four bytes, 4 k of a column
#     BF16  [K/2][48][2] bfloat16: k, k+1
#     F32   [K][48] float32
#
# A weight is scale * (code - 128). A U4 nibble becomes a code by the step and the base of its half of the group, which
# are those of a file's group of 32 in units of the scale:
#
#     code = base + (step * nibble >> 8)
#
# so that a whole group is one integer sum. Four bytes of nibbles hold k, ..., k+3 in their low halves and k+4, ..., k+7
# in their high ones, each pair swapped: that is where 16-bit products put the codes of even and odd k.
#
#     C[r, n] = sum over groups g of  s[r,g] * scale[n,g] * (dot(code, a) - 128 * sum(a))
#
# A few input channels are so large that they would coarsen their whole group. They are a property of the model; a row's
# values there are kept in float32, count as 0 in their group, and are multiplied on their own at the end, by weights
# that stand beside the tiles.
U4, U8, BF16, F32_WEIGHTS = 0, 1, 2, 3
# Two more kinds of tile, but of no layer, for 4 rows: a U4 tile that more rows will go through is unpacked by the first
# of them, and a U8 tile that has been read before, or was unpacked, is near and need not be fetched.
NEAR_U8, FIRST_U4 = 4, 5
# Where AMX multiplies a layer of U4, U8 or BF16, its descriptor says AMX_U4 + kind.
AMX_U4 = 6
KINDS = 6  # of tile in the table of `gemm`
COLUMNS = 48
VECTORS = COLUMNS // 16
GROUP = 64
HALF = GROUP // 2
UNIT = 4 * COLUMNS  # the fewest columns that are whole tiles and whole groups
SHORT_SUM = 32  # along K, of BF16 and F32
ZERO_CODE = 128
STEP_BITS = 8  # of a step's fraction
U4_GROUP = np.dtype(
    [
        ("nibbles", "<u4", (GROUP // 8, COLUMNS)),
        ("steps", "<u2", (2, COLUMNS)),
        ("bases", "u1", (2, COLUMNS)),
        ("scales", "<f2", COLUMNS),
    ]
)
U8_GROUP = np.dtype([("codes", "<u4", (GROUP // 4, COLUMNS)), ("scales", "<f2", COLUMNS), ("unused", "u1", 32)])
STEPS_AT, BASES_AT, U4_SCALES_AT = (int(U4_GROUP.fields[name][1]) for name in ("steps", "bases", "scales"))
U8_SCALES_AT = int(U8_GROUP.fields["scales"][1])
U4_BYTES, U8_BYTES = U4_GROUP.itemsize, U8_GROUP.itemsize
ROWS = 4
AMX_ROWS = 16  # that go through AMX at a time
# The sums of a tile for two times so many rows, where gate and up meet.
ROW_BYTES = COLUMNS * 4
SUMS_BYTES = 2 * AMX_ROWS * ROW_BYTES
ROW_BLOCK = 256  # the most rows that go through one unpacked tile
OWN_ROWS = 64  # from so many rows a thread on, a thread takes rows and all tiles; else tiles and all rows
LINE = 64
AHEAD = 4096  # bytes by which weights are fetched ahead of their use where a tile is used only once
MOST_OUTLIERS = 8
# A linear layer's descriptor, int64: kind, columns, K, address of the weights; how many outlier channels, address of
# their numbers (int64) and of their weights (float32 [tiles][MOST_OUTLIERS][48]); address where the inputs' magnitudes
# are summed up (float32 [K]), or 0; 1 where the result is added to what is there; where AMX multiplies integer weights,
# by 2 ** which they are made smaller and the inputs larger.
KIND, COLUMN_COUNT, DEPTH, WEIGHTS, OUTLIER_COUNT, OUTLIERS, OUTLIER_WEIGHTS, MAGNITUDES, ADDS, POWER = range(10)
DESCRIPTOR_SIZE = 10
# AMX's weights are float16 on the way, where a layer's largest scale is 2 ** SCALE_POWER or up to half of it, and all
# are 2 ** WEIGHT_POWER smaller once they are bfloat16.
SCALE_POWER, WEIGHT_POWER = 8, 16
# There, a row's inputs are in this order within 16: what is 16 bits apart in a tile are two inputs with one between.
PAIR_ORDER = [four + k for four in range(0, 16, 4) for k in (0, 2, 1, 3)]


def _integer_group(ir, kind, rows, vectors, g, acc, a, lda, w, first, sums, ldsums, unpacked):
    """One group along K for some vectors of a tile, from `first` on: integer dots, then the scales.

    FIRST_U4 leaves itself as a U8 tile at `unpacked`.
    """
    b = ir.b
    w_g = ir.at(w, ir.times(g, group_bytes.py_func(kind)))
    a_g = [ir.at(a, b.mul(lda, I64(r)), ir.times(g, GROUP)) for r in range(rows)]
    sums_g = [ir.at(sums, b.mul(ldsums, I64(r)), ir.times(g, 8)) for r in range(rows)]
    dots = [[ir.dot_start(ir.load_splat(I32, each, 4))] * vectors for each in sums_g]
    if two_chains := rows == 1 and kind == U8:
        dots.append([ir.const(V16I32, 0)] * vectors)  # every other product: one chain would be waited for
    columns = range(first, first + vectors)
    keeps, kept_g = kind == FIRST_U4, ir.at(unpacked, ir.times(g, U8_BYTES))
    for k, codes in enumerate(group_codes(ir, kind, w_g, columns, first == 0 and kind != NEAR_U8)):
        for j, x in zip(columns if keeps else [], codes, strict=False):
            ir.store(x, kept_g, (k * VECTORS + j) * 64)
        codes = [b.bitcast(x, V16I32) for x in codes]
        for r in range(rows):
            activation, chain = ir.load_splat(I32, a_g[r], 4 * k), k % 2 if two_chains else r
            dots[chain] = [ir.dot_u8s8(dot, x, activation) for dot, x in zip(dots[chain], codes, strict=True)]
    if two_chains:
        dots = [[b.add(even, odd) for even, odd in zip(*dots, strict=True)]]
    halves = [ir.load(V16I16, w_g, scales_at(kind) + 32 * j) for j in columns]
    for j, x in zip(columns if keeps else [], halves, strict=False):
        ir.store(x, kept_g, U8_SCALES_AT + 32 * j)
    scale = [ir.half_to_float(x) for x in halves]
    result = []
    for r in range(rows):
        s = ir.load_splat(F32, sums_g[r])
        for j, dot in enumerate(dots[r]):
            result.append(ir.fma(b.fmul(b.sitofp(dot, V16F32), s), scale[j], acc[r * vectors + j]))
    return result


def scales_at(kind):
    """Where in a group of an integer tile its scales begin."""
    return U4_SCALES_AT if kind in (U4, FIRST_U4) else U8_SCALES_AT


def group_codes(ir, kind, w_g, columns, fetches=False):
    """The codes of a group for some vectors of columns, four k after four k. fetches: the tile fetches itself, line by
    line between its instructions: a whole group's lines at once would hold these up."""
    lines = group_bytes.py_func(kind) // LINE if fetches else 0
    if kind in (U8, NEAR_U8):
        for k in range(GROUP // 4):
            _fetch_part(ir, w_g, lines, k, GROUP // 4)
            yield [ir.load(V64I8, w_g, (k * VECTORS + j) * 64) for j in columns]
        return
    for half in range(2):
        steps = [repeated(ir, ir.load(V16I16, w_g, STEPS_AT + (half * VECTORS + j) * 32), 2) for j in columns]
        bases = [repeated(ir, ir.load(V16I8, w_g, BASES_AT + (half * VECTORS + j) * 16), 4) for j in columns]
        for k in range(4 * half, 4 * half + 4):
            _fetch_part(ir, w_g, lines, k, GROUP // 8)
            raw = [ir.load(V64I8, w_g, (k * VECTORS + j) * 64) for j in columns]
            pairs = [_codes_of_nibbles(ir, *each) for each in zip(raw, steps, bases, strict=True)]
            yield [low for low, _ in pairs]
            yield [high for _, high in pairs]


def _fetch_part(ir, w_g, lines, part, parts):
    """Prefetch one part of the lines that stand AHEAD of a group, here and not earlier."""
    if lines:
        ir.in_place()
    for line in range(part * lines // parts, (part + 1) * lines // parts):
        ir.prefetch(w_g, AHEAD + line * LINE)


def repeated(ir, x, times, first=0):
    """Each of 16 elements, from `first` on, so many times in a row."""
    order = Constant(vector(I32, 16 * times), [first + i // times for i in range(16 * times)])
    return ir.b.shuffle_vector(x, Constant(x.type, Undefined), order)


def _codes_of_nibbles(ir, raw, step, base):
    """The codes of the low and of the high nibbles of a vector of bytes; step: <32 x i16>, base: <64 x i8>."""
    b, const = ir.b, partial(ir.const, V32I16)
    low, codes = b.bitcast(raw, V32I16), []
    for nibbles in (low, b.lshr(low, const(4))):
        # the whole part of step * nibble is the high byte of one product and, of the other, of its upper 16 bits' low
        odd = b.and_(b.mul(b.and_(nibbles, const(0x000F)), step), const(-0x100))
        even = ir.high_product(b.and_(nibbles, const(0x0F00)), step)
        codes.append(b.add(b.bitcast(b.or_(odd, even), V64I8), base))
    return codes


def _float_group(ir, kind, rows, vectors, g, acc, a, lda, w):
    """32 inputs for the first vectors of a tile of bfloat16 (pairs) or float32 weights, summed on their own and then
    added: the rounding errors of a short sum and of a sum of sums are smaller than those of one long chain."""
    totals, acc, steps = acc, [ir.zero()] * len(acc), SHORT_SUM // 2 if kind == BF16 else SHORT_SUM
    w_g = ir.at(w, ir.times(g, steps * VECTORS * 64))
    a_g = [ir.at(a, ir.b.mul(lda, I64(r)), ir.times(g, steps * 4)) for r in range(rows)]
    for k in range(steps):
        loaded = [ir.load(V16I32 if kind == BF16 else V16F32, w_g, (k * VECTORS + j) * 64) for j in range(vectors)]
        for r in range(rows):
            activation = ir.load_splat(I32 if kind == BF16 else F32, a_g[r], 4 * k)
            for j, weights in enumerate(loaded):
                x = r * vectors + j
                if kind == BF16:
                    acc[x] = ir.dot_bf16(acc[x], weights, activation)
                else:
                    acc[x] = ir.fma(weights, activation, acc[x])
    return [ir.b.fadd(total, partial) for total, partial in zip(totals, acc, strict=True)]


@intrinsic(prefer_literal=True)
def gemm_tile(
    typingctx,
    isa,
    kind,
    rows,
    blocks,
    add,
    a,
    lda,
    w,
    sums,
    ldsums,
    outliers,
    outlier_count,
    c,
    ldc,
    groups,
    near,
    near_count,
    unpacked,
):
    """C[0:blocks * rows, 0:48] = (where add is 1, +=) A @ W for one tile, `rows` rows after the other. Addresses,
    strides in bytes; the first three literal.

    a: int8, bfloat16 or float32 [rows][K] as the kind wants it. sums: for each row [K/64][float32 scale, int32 -128 *
    sum of codes], then its values of the outlier channels. groups: of 64 inputs, or of 32 for BF16 and F32. With each
    block of rows it fetches `near_count` cache lines from `near` on, the next ones with the next. unpacked: where
    FIRST_U4 leaves itself as a U8 tile.
    """
    isa_, kind_, rows_ = isa.literal_value, kind.literal_value, rows.literal_value

    def codegen(context, builder, signature, args):
        ir = Ir(builder, isa_)
        blocks, add, a, lda, w, sums, lds, outliers, outlier_count, c, ldc, groups = args[3:15]
        near, near_count, unpacked = args[15:]
        adds = builder.icmp_signed("!=", add, I64(0))
        vectors = ir.together(VECTORS, VECTORS if rows_ == 1 else 1)
        near_each = builder.sdiv(builder.add(near_count, builder.sub(groups, I64(1))), groups)

        def group(first, a, sums, near, g, acc):
            if first == 0:  # the first pass is the first that waits for memory
                start = ir.at(near, ir.times(builder.mul(g, near_each), LINE))
                ir.loop(near_each, [], lambda i, _: ir.prefetch(ir.at(start, ir.times(i, LINE))) or [])
            if kind_ in (BF16, F32_WEIGHTS):
                return _float_group(ir, kind_, rows_, vectors, g, acc, a, lda, ir.at(w, first * 64))
            return _integer_group(ir, kind_, rows_, vectors, g, acc, a, lda, w, first, sums, lds, unpacked)

        def some_rows(block, _):
            skipped = ir.times(block, rows_)
            a_b, sums_b, c_b = (ir.at(x, builder.mul(skipped, ld)) for x, ld in ((a, lda), (sums, lds), (c, ldc)))
            near_b = ir.at(near, ir.times(builder.mul(block, near_count), LINE))
            for r in range(rows_):
                for j in range(VECTORS):
                    ir.prefetch(ir.at(c_b, builder.mul(ldc, I64(r))), 64 * j)
            for first in range(0, VECTORS, vectors):
                acc = ir.loop(groups, [ir.zero()] * (rows_ * vectors), partial(group, first, a_b, sums_b, near_b))
                if kind_ not in (BF16, F32_WEIGHTS):
                    values = ir.at(sums_b, ir.times(groups, 8))
                    acc = add_outliers(ir, acc, vectors, values, lds, ir.at(outliers, first * 64), outlier_count)
                places = [
                    (ir.at(c_b, builder.mul(ldc, I64(r))), 64 * (first + j))
                    for r in range(rows_)
                    for j in range(vectors)
                ]
                with builder.if_else(adds) as (then, otherwise):
                    with then:
                        for (at, offset), value in zip(places, acc, strict=True):
                            ir.store(builder.fadd(ir.load(V16F32, at, offset), value), at, offset)
                    with otherwise:  # without a load, which would wait for memory that is written only
                        for (at, offset), value in zip(places, acc, strict=True):
                            ir.store(value, at, offset)
            return []

        ir.loop(blocks, [], some_rows)
        return context.get_dummy_value()

    return types.void(isa, kind, rows, *[types.int64] * 15), codegen


def add_outliers(ir, acc, vectors, values, ldvalues, weights, count):
    """acc[r] += sum over the outlier channels o of values[r, o] * weights[o]; float32."""
    b = ir.b

    def outlier(o, acc):
        at = ir.at(weights, ir.times(o, COLUMNS * 4))
        loaded = [ir.load(V16F32, at, 64 * j) for j in range(vectors)]
        rows = [ir.at(values, b.mul(ldvalues, I64(r)), ir.times(o, 4)) for r in range(len(acc) // vectors)]
        splats = [ir.load_splat(F32, each) for each in rows]
        return [ir.fma(splats[x // vectors], loaded[x % vectors], each) for x, each in enumerate(acc)]

    return ir.loop(count, acc, outlier)


@intrinsic
def fetch(typingctx, start, lines):
    """Ask for a run of cache lines."""

    def codegen(context, builder, signature, args):
        ir, (start, lines) = Ir(builder), args
        ir.loop(lines, [], lambda i, _: ir.prefetch(ir.at(start, ir.times(i, LINE))) or [])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@inner
def gemm(
    isa, kind, rows, blocks, add, a, lda, w, sums, ldsums, outliers, outlier_count, c, ldc, groups,
    near, near_count, unpacked,
):  # fmt: skip
    """gemm_tile as a function to be compiled on its own, once for each (isa, kind, rows)."""
    gemm_tile(
        isa, kind, rows, blocks, add, a, lda, w, sums, ldsums, outliers, outlier_count, c, ldc, groups,
        near, near_count, unpacked,
    )  # fmt: skip


@inner
def linear_tile(tiles, layer, tile, first, last, inputs, sums, c, ldc, scratch):
    """Rows first..last of one tile of a linear layer, while the weights that follow are fetched from memory.

    layer: its descriptor. inputs: the rows as prepared for the layer's kind, `input_stride` apart.
    c: the address of the first row's outputs, float32, ldc bytes from row to row. scratch: uint8, this thread's own,
    for an unpacked tile.
    """
    if layer[KIND] >= AMX_U4:
        rows_by_amx(tiles, layer, tile, last - first, address(inputs) + first * input_stride(layer), c, ldc, scratch)
        return
    kind, groups = layer[KIND], layer[DEPTH] // (GROUP if layer[KIND] <= U8 else SHORT_SUM)
    tile_bytes = groups * group_bytes(kind)
    source = w = layer[WEIGHTS] + tile * tile_bytes
    calls = (last - first + ROWS - 1) // ROWS
    near, near_count = source + (tile_bytes if calls > 1 else AHEAD), (tile_bytes + calls * LINE - 1) // (calls * LINE)
    if kind <= U8 and calls == 1:
        near_count = 0  # it fetches itself
    elif kind <= U8:
        kind = NEAR_U8 if kind == U8 else FIRST_U4
    count = layer[OUTLIER_COUNT]
    outliers = layer[OUTLIER_WEIGHTS] + tile * MOST_OUTLIERS * COLUMNS * 4
    fetch(outliers, count * VECTORS)
    lda, ldsums = input_stride(layer), sums.strides[0]
    a, s = address(inputs) + first * lda, address(sums) + first * ldsums
    rows, blocks = ROWS, (last - first) // ROWS
    if kind == FIRST_U4:
        blocks = 1
    while first < last:
        if blocks == 0:
            rows, blocks, kind = last - first, 1, U8 if kind == NEAR_U8 else kind
        call(
            tiles.gemm[kind, rows], 0, kind, rows, blocks, layer[ADDS], a, lda, w, s, ldsums, outliers, count,
            c, ldc, groups, near, near_count, address(scratch),
        )  # fmt: skip
        done = blocks * rows
        first, a, s, c = first + done, a + done * lda, s + done * ldsums, c + done * ldc
        near, blocks = near + blocks * near_count * LINE, (last - first) // ROWS
        if kind == FIRST_U4:
            kind, w = NEAR_U8, address(scratch)


@merged
def rows_by_amx(tiles, layer, tile, rows, a, c, ldc, scratch):
    """linear_tile by AMX: the first rows while the tile becomes bfloat16, the others after them; a is their address.
    Only what is unpacked is fetched ahead."""
    lda, done = input_stride(layer), first_by_amx(tiles, layer, tile, rows, a, c, ldc, address(scratch))
    if done < rows:
        w, steps = unpacked_at(layer, tile, address(scratch)), layer[DEPTH] // SHORT_SUM
        call(tiles.more_rows, rows - done, layer[ADDS], a + done * lda, lda, w, c + done * ldc, ldc, steps)


@inner
def first_by_amx(tiles, layer, tile, rows, a, c, ldc, unpacked):
    """The first rows, while the tile is unpacked for those after them; how many, none where it is bfloat16 already."""
    kind, depth = layer[KIND] - AMX_U4, layer[DEPTH]
    if kind > U8:
        return np.int64(0)
    together, count = 2 if rows >= 2 * AMX_ROWS else 1, min(rows, AMX_ROWS)
    done = count * together
    call(
        tiles.first_rows[kind, together], 0, 0, count, layer[ADDS], a, input_stride(layer), tile_at(layer, tile),
        unpacked, 1 if done == rows else -1, c, ldc, depth // GROUP, layer[POWER],
    )  # fmt: skip
    return done


@inner
def tile_at(layer, tile):
    """The address of a tile of a layer that AMX multiplies."""
    kind = layer[KIND] - AMX_U4
    return layer[WEIGHTS] + tile * (layer[DEPTH] // (GROUP if kind <= U8 else SHORT_SUM) * group_bytes(kind))


@inner
def unpacked_at(layer, tile, unpacked):
    """Where the same tile is in bfloat16, if its first rows have left it at `unpacked`."""
    return unpacked if layer[KIND] - AMX_U4 <= U8 else tile_at(layer, tile)


@merged
def gated_by_amx(tiles, layer, down, gate, up, rows, a, room, unpacked, target, ldtarget):
    """The activation of one tile of a layer times another, as the rows at target, the inputs of the layer down; room,
    unpacked: addresses, of 4 * SUMS_BYTES and of two tiles in bfloat16."""
    lda, depth = input_stride(layer), layer[DEPTH]
    second = unpacked + depth * COLUMNS * 2
    done = first_by_amx(tiles, layer, gate, rows, a, room, ROW_BYTES, unpacked)
    first_by_amx(tiles, layer, up, rows, a, room + SUMS_BYTES, ROW_BYTES, second)
    call(
        tiles.gated, 0, done, rows - done, room, a + done * lda, lda, unpacked_at(layer, gate, unpacked),
        unpacked_at(layer, up, second), target, ldtarget, depth // SHORT_SUM, 1 if down[KIND] < AMX_U4 + BF16 else 0,
        down[POWER],
    )  # fmt: skip


@inner
def input_stride(layer):
    """Bytes from one prepared input row of a layer to the next: the row, and a line so that rows do not share sets."""
    kind = layer[KIND]
    return LINE + layer[DEPTH] * (1 if kind <= U8 else 4 if kind == F32_WEIGHTS else 2)


@inner
def group_bytes(kind):
    """Of a tile: 64 inputs, or 32 where a tile is not integers."""
    if kind in (U4, FIRST_U4):
        return U4_BYTES
    if kind in (U8, NEAR_U8):
        return U8_BYTES
    return SHORT_SUM * (96 if kind == BF16 else 192)


@compiled
def linear(tiles, sync, thread, layer, rows, inputs, sums, outputs, scratch):
    """outputs[:rows] = (where the layer adds, +=) inputs[:rows] @ W.T, shared out by tile and block of rows."""
    across, block, ldc = layer[COLUMN_COUNT] // COLUMNS, rows_at_once(rows, len(sync) // 2), outputs.strides[0]
    for item in shared_items(sync, thread, across * ((rows + block - 1) // block)):
        tile, first = item % across, item // across * block
        last, c = min(first + block, rows), address(outputs) + first * ldc + tile * COLUMNS * 4
        linear_tile(tiles, layer, tile, first, last, inputs, sums, c, ldc, scratch)


@inner
def rows_at_once(rows, threads):
    """How many rows go through a tile at a time. Where there are enough of them, the blocks are such that a thread's
    share of a linear layer is the same rows as in the phases before and after, which are then in its own caches."""
    if rows < threads * OWN_ROWS:
        return ROW_BLOCK
    blocks = threads * ((rows + threads * ROW_BLOCK - 1) // (threads * ROW_BLOCK))
    return ((rows + blocks - 1) // blocks + ROWS - 1) // ROWS * ROWS
