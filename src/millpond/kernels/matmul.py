"""Linear layers: C[r, n] = sum over k of A[r, k] * W[n, k], in tiles of 4 rows by 48 columns.

A weight matrix is cut along N into tiles of 48 columns and along K into groups of 32. U4 and U8 are affine,
w = scale * code + offset with a float16 scale and offset for each (column, group), and meet signed 8-bit activations
with a float32 scale for each (row, group); BF16 and F32 are what their names say.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.kernels.isa import AVX2
from millpond.kernels.link import call
from millpond.kernels.simd import F32, I32, I64, V16F32, V16I16, V16I32, V32I16, V64I8, Ir, address
from millpond.kernels.threads import shared_items

# In a tile, all bytes for a few k stand side by side for the 48 columns, so that one load feeds 16 lanes:
#
#     U4    [K/8][48][4] bytes: low nibbles are k..k+3, high nibbles k+4..k+7
#     U8    [K/4][48][4] bytes: k..k+3
#     BF16  [K/2][48][2] bfloat16: k, k+1
#     F32   [K][48] float32
#
# The scales of U4 and U8 are [K/32][scale: 48, offset: 48] float16, and
#
#     C[r, n] = sum over groups g of  s[r,g] * (scale[n,g] * dot(code, a) + offset[n,g] * sum(a))
#
# A few input channels are so large that they would coarsen their whole group. They are a property of the model; a row's
# values there are kept in float32, count as 0 in their group, and are multiplied on their own at the end.
U4, U8, BF16, F32_WEIGHTS = 0, 1, 2, 3
COLUMNS = 48
VECTORS = COLUMNS // 16
UNIT = 2 * COLUMNS  # the fewest columns that are whole tiles and whole groups
GROUP = 32
ROWS = 4
ROW_BLOCK = 128  # the most rows that go through one unpacked tile
OWN_ROWS = 64  # from so many rows a thread on, a thread takes rows and all tiles; else tiles and all rows
UNPACK_ROWS = 20  # from so many rows on, a 4-bit tile is unpacked once instead of for every 4 rows
SCALE_BYTES = 2 * COLUMNS * 2  # one group of one tile
LINE = 64
AHEAD = 4096  # bytes by which weights are fetched ahead of their use where a tile is used only once
SCALES_AHEAD = 4 * SCALE_BYTES  # the same for scales, always: those of a whole long tile would not stay in the cache

# A linear layer's descriptor, int64: kind, columns, K, address of the weights, of the scales; how many outlier
# channels, address of their numbers (int64) and of their weights (float32 [tiles][channels][48]); address where the
# inputs' magnitudes are summed up (float32 [K]), or 0; 1 where the result is added to what is there.
KIND, COLUMN_COUNT, DEPTH, WEIGHTS, SCALES, OUTLIER_COUNT, OUTLIERS, OUTLIER_WEIGHTS, MAGNITUDES, ADDS = range(10)
DESCRIPTOR_SIZE = 10


def _affine_group(ir, kind, rows, vectors, g, acc, a, lda, w, scales, sums, ldsums):
    """One group of 32 along K for the first vectors of a tile of affine weights: integer dots, then the scales."""
    b = ir.b
    steps = GROUP // (8 if kind == U4 else 4)
    w_g = ir.at(w, ir.times(g, steps * VECTORS * 64))
    a_g = [ir.at(a, b.mul(lda, I64(r)), ir.times(g, GROUP)) for r in range(rows)]
    dots = [[GroupDot(ir, kind) for _ in range(vectors)] for _ in range(rows)]
    for k in range(steps):
        raw = [ir.load(V64I8, w_g, (k * VECTORS + j) * 64) for j in range(vectors)]
        for h, codes in enumerate(nibbles(ir, raw) if kind == U4 else [raw]):
            codes = [b.bitcast(x, V16I32) for x in codes]
            for r in range(rows):
                activation = ir.load_splat(I32, a_g[r], (k * (2 if kind == U4 else 1) + h) * 4)
                for dot, x in zip(dots[r], codes, strict=True):
                    dot.add(x, activation)
    s_g = ir.at(scales, ir.times(g, SCALE_BYTES))
    scale = [ir.half_to_float(ir.load(V16I16, s_g, 32 * j)) for j in range(vectors)]
    offset = [ir.half_to_float(ir.load(V16I16, s_g, 32 * (VECTORS + j))) for j in range(vectors)]
    result = []
    for r in range(rows):
        sums_g = ir.at(sums, b.mul(ldsums, I64(r)), ir.times(g, 8))
        s, s_sum = ir.load_splat(F32, sums_g), ir.load_splat(F32, sums_g, 4)
        for j, dot in enumerate(dots[r]):
            scaled = b.fmul(b.sitofp(dot.total(), V16F32), s)
            result.append(ir.fma(s_sum, offset[j], ir.fma(scaled, scale[j], acc[r * vectors + j])))
    return result


class GroupDot:
    """The integer dots of one group for 16 columns. Codes of 4 bits meet AVX2 in 16 bits, which hold a group's sum."""

    def __init__(self, ir, kind):
        self.ir, self.pairs = ir, kind == U4 and ir.isa == AVX2
        self.sum = ir.const(V32I16 if self.pairs else V16I32, 0)

    def add(self, codes, activations):
        """Four inputs more: <16 x i32> each, of unsigned and of signed bytes."""
        add = self.ir.pairs_u4s8 if self.pairs else self.ir.dot_u8s8
        self.sum = add(self.sum, codes, activations)

    def total(self):
        """<16 x i32>."""
        return self.ir.add_pairs(self.sum) if self.pairs else self.sum


def nibbles(ir, raw):
    """The low and the high nibbles of vectors of bytes."""
    low, four = ir.const(V64I8, 15), ir.const(V64I8, 4)
    return [ir.b.and_(x, low) for x in raw], [ir.b.lshr(x, four) for x in raw]


def _float_group(ir, kind, rows, vectors, g, acc, a, lda, w):
    """One group of 32 along K for the first vectors of a tile of bfloat16 (pairs) or float32 weights, summed on its own
    and then added: the rounding errors of a short sum and of a sum of sums are smaller than those of one long chain."""
    totals, acc, steps = acc, [ir.zero()] * len(acc), GROUP // 2 if kind == BF16 else GROUP
    w_g = ir.at(w, ir.times(g, steps * VECTORS * 64))
    a_g = [ir.at(a, ir.b.mul(lda, I64(r)), ir.times(g, steps * 4)) for r in range(rows)]
    for k in range(steps):
        loaded = [ir.load(V16I32 if kind == BF16 else V16F32, w_g, (k * VECTORS + j) * 64) for j in range(vectors)]
        for r in range(rows):
            activation = ir.load_splat(I32 if kind == BF16 else F32, a_g[r], 4 * k)
            for j, vector in enumerate(loaded):
                x = r * vectors + j
                if kind == BF16:
                    acc[x] = ir.dot_bf16(acc[x], vector, activation)
                else:
                    acc[x] = ir.fma(vector, activation, acc[x])
    return [ir.b.fadd(total, partial) for total, partial in zip(totals, acc, strict=True)]


@intrinsic(prefer_literal=True)
def gemm_tile(
    typingctx,
    isa,
    kind,
    rows,
    add,
    a,
    lda,
    w,
    scales,
    sums,
    ldsums,
    c,
    ldc,
    groups,
    near,
    near_count,
    far,
    far_count,
):
    """C[0:rows, 0:48] = (where add is 1, +=) A @ W for one tile. Addresses, strides in bytes; the first three literal.

    a: int8, bfloat16 or float32 [rows][K] as the kind wants it. sums: for each row float32 [K/32][scale, scale * sum of
    codes]. While it computes it fetches the scales ahead and two runs of cache lines, at `near` and at `far`.
    """
    isa_, kind_, rows_ = isa.literal_value, kind.literal_value, rows.literal_value

    def codegen(context, builder, signature, args):
        ir = Ir(builder, isa_)
        add, a, lda, w, scales, sums, lds, c, ldc, groups, near, near_count, far, far_count = args[3:]
        adds, next_scales = builder.icmp_signed("!=", add, I64(0)), ir.at(scales, I64(SCALES_AHEAD))
        vectors = ir.together(VECTORS, VECTORS if rows_ == 1 else 1)
        runs = [(near, near_count), (far, far_count)]
        runs = [(*run, builder.sdiv(builder.add(run[1], builder.sub(groups, I64(1))), groups)) for run in runs]

        def fetch(g):
            for start, lines, each in runs:
                _fetch_share(ir, g, start, lines, each)
            for line in range(SCALE_BYTES // LINE if kind_ in (U4, U8) else 0):
                ir.prefetch(ir.at(next_scales, ir.times(g, SCALE_BYTES)), line * LINE)

        def group(index, w, scales, g, acc):
            if index == 0:  # the first pass is the first that waits for memory
                fetch(g)
            if kind_ in (BF16, F32_WEIGHTS):
                return _float_group(ir, kind_, rows_, vectors, g, acc, a, lda, w)
            return _affine_group(ir, kind_, rows_, vectors, g, acc, a, lda, w, scales, sums, lds)

        for index in range(VECTORS // vectors):
            w_p, s_p, c_p = (ir.at(x, index * vectors * size) for x, size in ((w, 64), (scales, 32), (c, 64)))
            acc = ir.loop(groups, [ir.zero()] * (rows_ * vectors), partial(group, index, w_p, s_p))
            for r in range(rows_):
                c_r = ir.at(c_p, builder.mul(ldc, I64(r)))
                for j in range(vectors):
                    value = acc[r * vectors + j]
                    total = builder.fadd(ir.load(V16F32, c_r, 64 * j), value)
                    ir.store(builder.select(adds, total, value), c_r, 64 * j)
        return context.get_dummy_value()

    return types.void(isa, kind, rows, *[types.int64] * 14), codegen


def _fetch_share(ir, g, start, lines, each):
    """Prefetch the g-th `each` of a run of cache lines."""
    b, done = ir.b, ir.b.mul(g, each)
    left = b.sub(lines, done)
    count = b.select(b.icmp_signed("<", left, each), left, each)
    ir.loop(count, [], lambda i, _: ir.prefetch(ir.at(start, ir.times(b.add(done, i), LINE))) or [])


@intrinsic
def outlier_rows(typingctx, rows, c, ldc, outliers, x, ldx, count):
    """C[r, 0:48] += sum over o of x[r, o] * outliers[o, 0:48]; float32, addresses, strides in bytes."""

    def codegen(context, builder, signature, args):
        ir, (rows, c, ldc, outliers, x, ldx, count) = Ir(builder), args

        def some_rows(first, together):
            at = [builder.add(first, I64(r)) for r in range(together)]
            c_rows = [ir.at(c, builder.mul(ldc, r)) for r in at]
            x_rows = [ir.at(x, builder.mul(ldx, r)) for r in at]

            def outlier(o, acc):
                w = [ir.load(V16F32, ir.at(outliers, ir.times(o, COLUMNS * 4)), 64 * j) for j in range(VECTORS)]
                values = [ir.load_splat(F32, ir.at(x_row, ir.times(o, 4))) for x_row in x_rows]
                return [ir.fma(values[i // VECTORS], w[i % VECTORS], each) for i, each in enumerate(acc)]

            acc = ir.loop(count, [ir.load(V16F32, c_r, 64 * j) for c_r in c_rows for j in range(VECTORS)], outlier)
            for i, each in enumerate(acc):
                ir.store(each, c_rows[i // VECTORS], 64 * (i % VECTORS))
            return []

        whole = builder.sdiv(rows, I64(ROWS))
        ir.loop(whole, [], lambda i, _: some_rows(ir.times(i, ROWS), ROWS))
        start = ir.times(whole, ROWS)
        ir.loop(builder.sub(rows, start), [], lambda i, _: some_rows(builder.add(start, i), 1))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@intrinsic
def fetch(typingctx, start, lines):
    """Ask for a run of cache lines."""

    def codegen(context, builder, signature, args):
        ir, (start, lines) = Ir(builder), args
        ir.loop(lines, [], lambda i, _: ir.prefetch(ir.at(start, ir.times(i, LINE))) or [])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def unpack_tile(typingctx, source, target, count):
    """Spread `count` runs of 192 bytes (a U4 tile's 8 k for 48 columns) into the layout of a U8 tile."""

    def codegen(context, builder, signature, args):
        ir, (source, target, count) = Ir(builder), args

        def step(i, _):
            raw = [ir.load(V64I8, ir.at(source, ir.times(i, 192)), 64 * j) for j in range(VECTORS)]
            for h, half in enumerate(nibbles(ir, raw)):
                for j in range(VECTORS):
                    ir.store(half[j], ir.at(target, ir.times(i, 384)), h * 192 + 64 * j)
            return []

        ir.loop(count, [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(cache=True, nogil=True)
def outliers(rows, c, ldc, weights, x, ldx, count):
    """outlier_rows as a function to be compiled on its own."""
    outlier_rows(rows, c, ldc, weights, x, ldx, count)


@njit(cache=True, nogil=True)
def gemm(isa, kind, rows, add, a, lda, w, scales, sums, ldsums, c, ldc, groups, near, near_count, far, far_count):
    """gemm_tile as a function to be compiled on its own, once for each (isa, kind, rows)."""
    gemm_tile(isa, kind, rows, add, a, lda, w, scales, sums, ldsums, c, ldc, groups, near, near_count, far, far_count)


@njit(cache=True, nogil=True)
def unpack(source, target, count):
    """unpack_tile as a function to be compiled on its own."""
    unpack_tile(source, target, count)


@njit(cache=True, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def linear_tile(tiles, layer, tile, first, last, inputs, sums, c, ldc, scratch, errand, index):
    """Rows first..last of one tile of a linear layer, while the weights that follow are fetched from memory, and the
    part of an errand that falls to these calls, the first of which is number `index`.

    layer: its descriptor. inputs: the rows as prepared for the layer's kind, `input_stride` apart.
    c: the address of the first row's outputs, float32, ldc bytes from row to row. scratch: uint8, this thread's own,
    for an unpacked tile. Returns the number of the next call.
    """
    kind, depth = layer[KIND], layer[DEPTH]
    groups, tile_bytes = depth // GROUP, depth * tile_bytes_per_k(kind)
    source = w = layer[WEIGHTS] + tile * tile_bytes
    scales = layer[SCALES] + tile * groups * SCALE_BYTES
    calls = (last - first + ROWS - 1) // ROWS
    near, near_count = source + (tile_bytes if calls > 1 else AHEAD), (tile_bytes + calls * LINE - 1) // (calls * LINE)
    if kind == U4 and last - first >= tiles.unpack_rows:
        kind, w = U8, address(scratch)
        call(tiles.unpack, source, w, depth // 8)
    lda, ldsums = input_stride(layer), sums.strides[0]
    s = address(sums) + first * ldsums
    count = layer[OUTLIER_COUNT]
    outlier_weights = layer[OUTLIER_WEIGHTS] + tile * count * COLUMNS * 4
    fetch(outlier_weights, count * VECTORS)
    for row in range(0, last - first, ROWS):
        rows = min(ROWS, last - first - row)
        a = address(inputs) + (first + row) * lda
        call(
            tiles.gemm[kind, rows], 0, kind, rows, layer[ADDS], a, lda, w, scales, s + row * ldsums, ldsums,
            c + row * ldc, ldc, groups, near, near_count, *part_of(errand, index),
        )  # fmt: skip
        near, index = near + near_count * LINE, index + 1
    if count:
        call(tiles.outliers, last - first, c, ldc, outlier_weights, s + groups * 8, ldsums, count)
    return index


@njit(cache=True, nogil=True)
def input_stride(layer):
    """Bytes from one prepared input row of a layer to the next: the row, and a line so that rows do not share sets."""
    kind, depth = layer[KIND], layer[DEPTH]
    return 64 + depth * (1 if kind <= U8 else 2 if kind == BF16 else 4)


@njit(cache=True, nogil=True)
def tile_bytes_per_k(kind):
    if kind == U4:
        return 24
    if kind == U8:
        return 48
    return 96 if kind == BF16 else 192


class Errand(NamedTuple):
    """Memory that a thread fetches behind the arithmetic of a few linear layers, because it will read it next.

    runs: int64, the numbers of runs `stride` bytes apart from `base`, each fetched by `parts` calls of a tile, `lines`
    cache lines a call.
    """

    base: int
    stride: int
    runs: NDArray[np.int64]
    parts: int
    lines: int


@njit(cache=True, nogil=True)
def new_errand(base, stride, runs, calls):
    """An errand to be done in about `calls` calls of a tile."""
    lines, parts = stride // LINE, max(1, calls // max(1, runs.size))
    return Errand(base, stride, runs, parts, (lines + parts - 1) // parts)


@njit(cache=True, nogil=True)
def part_of(errand, index):
    """Address and number of the cache lines that the errand's call `index` fetches."""
    run = index // errand.parts
    if run >= errand.runs.size:
        return 0, 0
    return errand.base + errand.runs[run] * errand.stride + index % errand.parts * errand.lines * LINE, errand.lines


@njit(cache=True, nogil=True)
def calls_of(layer, rows):
    """How many calls of a tile a linear layer takes."""
    return layer[COLUMN_COUNT] // COLUMNS * ((rows + ROWS - 1) // ROWS)


@njit(cache=True, nogil=True)
def linear(tiles, sync, thread, layer, rows, inputs, sums, outputs, scratch, errand, index):
    """outputs[:rows] = (where the layer adds, +=) inputs[:rows] @ W.T, shared out by tile and block of rows.

    Its calls do the errand from call `index` on; returns the number of the next one.
    """
    across, block, ldc = layer[COLUMN_COUNT] // COLUMNS, rows_at_once(rows, len(sync) // 2), outputs.strides[0]
    for item in shared_items(sync, thread, across * ((rows + block - 1) // block)):
        tile, first = item % across, item // across * block
        last, c = min(first + block, rows), address(outputs) + first * ldc + tile * COLUMNS * 4
        index = linear_tile(tiles, layer, tile, first, last, inputs, sums, c, ldc, scratch, errand, index)
    return index


@njit(cache=True, nogil=True)
def rows_at_once(rows, threads):
    """How many rows go through a tile at a time. Where there are enough of them, the blocks are such that a thread's
    share of a linear layer is the same rows as in the phases before and after, which are then in its own caches."""
    if rows < threads * OWN_ROWS:
        return ROW_BLOCK
    blocks = threads * ((rows + threads * ROW_BLOCK - 1) // (threads * ROW_BLOCK))
    return ((rows + blocks - 1) // blocks + ROWS - 1) // ROWS * ROWS
