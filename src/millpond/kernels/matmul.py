"""Linear layers: C[r, n] = sum over k of A[r, k] * W[n, k], in tiles of 4 rows by 48 columns.

A weight matrix is cut along N into tiles of 48 columns and along K into groups of 32. U4 and U8 are affine,
w = scale * code + offset with a float16 scale and offset for each (column, group), and meet signed 8-bit activations
with a float32 scale for each (row, group); BF16 and F32 are what their names say.
"""

from numba import njit, types
from numba.extending import intrinsic

from millpond.kernels.link import call
from millpond.kernels.simd import F32, I32, I64, V16F32, V16I16, V16I32, V64I8, Ir, address
from millpond.kernels.threads import done, take, wait_for

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
GROUP = 32
ROWS = 4
ROW_BLOCK = 128  # rows that go through one unpacked tile
UNPACK_ROWS = 8  # from so many rows on, a 4-bit tile is unpacked once instead of for every 4 rows
SCALE_BYTES = 2 * COLUMNS * 2  # one group of one tile

# A linear layer's descriptor, int64: kind, columns, K, address of the weights, of the scales; how many outlier
# channels, address of their numbers (int64); address where the inputs' magnitudes are summed up (float32 [K]), or 0;
# 1 where the result is added to what is there.
KIND, COLUMN_COUNT, DEPTH, WEIGHTS, SCALES, OUTLIER_COUNT, OUTLIERS, MAGNITUDES, ADDS = range(9)
DESCRIPTOR_SIZE = 9


def _affine_group(ir, bits, rows, g, acc, a, lda, w, scales, sums, ldsums):
    """One group of 32 along K for a tile of affine weights: integer dots, then the scales."""
    b = ir.b
    steps = GROUP // (8 if bits == 4 else 4)
    w_g = ir.at(w, ir.times(g, steps * VECTORS * 64))
    a_g = [ir.at(a, b.mul(lda, I64(r)), ir.times(g, GROUP)) for r in range(rows)]
    ints = [[ir.const(V16I32, 0)] * VECTORS for _ in range(rows)]
    for k in range(steps):
        raw = [ir.load(V64I8, w_g, (k * VECTORS + j) * 64) for j in range(VECTORS)]
        for h, codes in enumerate(nibbles(ir, raw) if bits == 4 else [raw]):
            codes = [b.bitcast(x, V16I32) for x in codes]
            for r in range(rows):
                activation = ir.load_splat(I32, a_g[r], (k * (8 // bits) + h) * 4)
                for j in range(VECTORS):
                    ints[r][j] = ir.dot_u8s8(ints[r][j], codes[j], activation)
    s_g = ir.at(scales, ir.times(g, SCALE_BYTES))
    scale = [ir.half_to_float(ir.load(V16I16, s_g, 32 * j)) for j in range(VECTORS)]
    offset = [ir.half_to_float(ir.load(V16I16, s_g, 32 * (VECTORS + j))) for j in range(VECTORS)]
    result = []
    for r in range(rows):
        sums_g = ir.at(sums, b.mul(ldsums, I64(r)), ir.times(g, 8))
        s, s_sum = ir.load_splat(F32, sums_g), ir.load_splat(F32, sums_g, 4)
        for j in range(VECTORS):
            scaled = b.fmul(b.sitofp(ints[r][j], V16F32), s)
            result.append(ir.fma(s_sum, offset[j], ir.fma(scaled, scale[j], acc[r * VECTORS + j])))
    return result


def _outlier(ir, rows, o, acc, sums, ldsums, groups, outliers):
    """One outlier channel: its 48 float32 weights times the rows' values, which follow their sums."""
    weights = [ir.load(V16F32, ir.at(outliers, ir.times(o, COLUMNS * 4)), 64 * j) for j in range(VECTORS)]
    result = []
    for r in range(rows):
        x = ir.load_splat(F32, ir.at(sums, ir.b.mul(ldsums, I64(r)), ir.times(groups, 8), ir.times(o, 4)))
        result += [ir.fma(x, weights[j], acc[r * VECTORS + j]) for j in range(VECTORS)]
    return result


def nibbles(ir, raw):
    """The low and the high nibbles of vectors of bytes."""
    low, four = ir.const(V64I8, 15), ir.const(V64I8, 4)
    return [ir.b.and_(x, low) for x in raw], [ir.b.lshr(x, four) for x in raw]


def _float_group(ir, kind, rows, g, acc, a, lda, w):
    """One group of 32 along K for a tile of bfloat16 (pairs) or float32 weights, summed on its own and then added:
    the rounding errors of a short sum and of a sum of sums are smaller than those of one long chain."""
    totals, acc, steps = acc, [ir.zero()] * len(acc), GROUP // 2 if kind == BF16 else GROUP
    w_g = ir.at(w, ir.times(g, steps * VECTORS * 64))
    a_g = [ir.at(a, ir.b.mul(lda, I64(r)), ir.times(g, steps * 4)) for r in range(rows)]
    for k in range(steps):
        vectors = [ir.load(V16I32 if kind == BF16 else V16F32, w_g, (k * VECTORS + j) * 64) for j in range(VECTORS)]
        for r in range(rows):
            activation = ir.load_splat(I32 if kind == BF16 else F32, a_g[r], 4 * k)
            for j in range(VECTORS):
                x = r * VECTORS + j
                if kind == BF16:
                    acc[x] = ir.dot_bf16(acc[x], vectors[j], activation)
                else:
                    acc[x] = ir.fma(vectors[j], activation, acc[x])
    return [ir.b.fadd(total, partial) for total, partial in zip(totals, acc, strict=True)]


@intrinsic(prefer_literal=True)
def gemm_tile(typingctx, avx512, kind, rows, add, a, lda, w, scales, sums, ldsums, c, ldc, groups, outliers, count):
    """C[0:rows, 0:48] = (where add is 1, +=) A @ W for one tile. Addresses, strides in bytes; the first three literal.

    a: int8, bfloat16 or float32 [rows][K] as the kind wants it. sums: for each row float32 [K/32][scale, scale * sum of
    codes], then the values of the `count` outlier channels. outliers: float32 [count][48], their weights.
    """
    avx512_, kind_, rows_ = avx512.literal_value, kind.literal_value, rows.literal_value

    def codegen(context, builder, signature, args):
        ir = Ir(builder, avx512_)
        add, a, lda, w, scales, sums, ldsums, c, ldc, groups, outliers, count = args[3:]
        adds = builder.icmp_signed("!=", add, I64(0))

        def group(g, acc):
            if kind_ in (U4, U8):
                return _affine_group(ir, 4 if kind_ == U4 else 8, rows_, g, acc, a, lda, w, scales, sums, ldsums)
            return _float_group(ir, kind_, rows_, g, acc, a, lda, w)

        acc = ir.loop(groups, [ir.zero()] * (rows_ * VECTORS), group)
        if kind_ in (U4, U8):
            acc = ir.loop(count, acc, lambda o, acc: _outlier(ir, rows_, o, acc, sums, ldsums, groups, outliers))
        for r in range(rows_):
            c_r = ir.at(c, builder.mul(ldc, I64(r)))
            for j in range(VECTORS):
                value = acc[r * VECTORS + j]
                total = builder.fadd(ir.load(V16F32, c_r, 64 * j), value)
                ir.store(builder.select(adds, total, value), c_r, 64 * j)
        return context.get_dummy_value()

    return types.void(avx512, kind, rows, *[types.int64] * 12), codegen


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


@intrinsic(prefer_literal=True)
def outlier_tile(typingctx, kind, w, scales, channels, count, target):
    """target = float32 [count][48], the weights of the given input channels (int64 [count]) in one affine tile."""
    bits = 4 if kind.literal_value == U4 else 8

    def codegen(context, builder, signature, args):
        ir, b = Ir(builder), builder
        w, scales, channels, count, target = args[1:]

        def one(o, _):
            channel = ir.load(I64, ir.at(channels, ir.times(o, 8)))
            run, shift = b.sdiv(channel, I64(32 // bits)), ir.times(b.and_(channel, I64(3)), 8)
            if bits == 4:
                shift = b.add(shift, b.and_(channel, I64(4)))  # channels 4 to 7 of a run are the high nibbles
            shift = ir.splat(b.trunc(shift, I32))
            s_g = ir.at(scales, ir.times(b.sdiv(channel, I64(GROUP)), SCALE_BYTES))
            for j in range(VECTORS):
                codes = b.lshr(ir.load(V16I32, ir.at(w, ir.times(run, VECTORS * 64)), 64 * j), shift)
                code = b.sitofp(b.and_(codes, ir.const(V16I32, 2**bits - 1)), V16F32)
                scale, offset = (ir.half_to_float(ir.load(V16I16, s_g, 32 * (j + half))) for half in (0, VECTORS))
                ir.store(ir.fma(code, scale, offset), ir.at(target, ir.times(o, COLUMNS * 4)), 64 * j)
            return []

        ir.loop(count, [], one)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 5), codegen


@njit(cache=True, nogil=True)
def outlier_weights(kind, w, scales, channels, count, target):
    """outlier_tile as a function to be compiled on its own, once for each affine kind."""
    outlier_tile(kind, w, scales, channels, count, target)


@njit(cache=True, nogil=True)
def gemm(avx512, kind, rows, add, a, lda, w, scales, sums, ldsums, c, ldc, groups, outliers, count):
    """gemm_tile as a function to be compiled on its own, once for each (avx512, kind, rows)."""
    gemm_tile(avx512, kind, rows, add, a, lda, w, scales, sums, ldsums, c, ldc, groups, outliers, count)


@njit(cache=True, nogil=True)
def unpack(source, target, count):
    """unpack_tile as a function to be compiled on its own."""
    unpack_tile(source, target, count)


@njit(cache=True, nogil=True)
def linear_tile(tiles, layer, tile, first, last, inputs, sums, outputs, scratch):
    """Rows first..last of one tile of a linear layer.

    layer: its descriptor. inputs: the rows as prepared for the layer's kind, `input_stride` apart.
    outputs: float32 [rows, at least columns]. scratch: uint8, this thread's own, for the weights of outlier channels
    and then an unpacked tile.
    """
    kind, depth = layer[KIND], layer[DEPTH]
    groups = depth // GROUP
    w = layer[WEIGHTS] + tile * depth * _tile_bytes_per_k(kind)
    scales = layer[SCALES] + tile * groups * SCALE_BYTES
    outliers, count = address(scratch), layer[OUTLIER_COUNT]
    if count:
        call(tiles.outliers[kind], kind, w, scales, layer[OUTLIERS], count, outliers)
    if kind == U4 and last - first >= UNPACK_ROWS:
        unpacked = outliers + count * COLUMNS * 4
        call(tiles.unpack, w, unpacked, depth // 8)
        kind, w = U8, unpacked
    lda, ldc, ldsums = input_stride(layer), outputs.strides[0], sums.strides[0]
    row = first
    while row < last:
        rows = min(ROWS, last - row)
        a, c = address(inputs) + row * lda, address(outputs) + row * ldc + tile * COLUMNS * 4
        s = address(sums) + row * ldsums
        call(
            tiles.gemm[kind, rows], 0, kind, rows, layer[ADDS], a, lda, w, scales, s, ldsums, c, ldc, groups,
            outliers, count,
        )  # fmt: skip
        row += rows


@njit(cache=True, nogil=True)
def input_stride(layer):
    """Bytes from one prepared input row of a layer to the next: the row, and a line so that rows do not share sets."""
    kind, depth = layer[KIND], layer[DEPTH]
    return 64 + depth * (1 if kind <= U8 else 2 if kind == BF16 else 4)


@njit(cache=True, nogil=True)
def _tile_bytes_per_k(kind):
    if kind == U4:
        return 24
    if kind == U8:
        return 48
    return 96 if kind == BF16 else 192


@njit(cache=True, nogil=True)
def linear(tiles, sync, phase, layer, rows, inputs, sums, outputs, scratch):
    """outputs[:rows] = (where the layer adds, +=) inputs[:rows] @ W.T, shared out by tile and block of rows."""
    across, blocks = layer[COLUMN_COUNT] // COLUMNS, (rows + ROW_BLOCK - 1) // ROW_BLOCK
    items = across * blocks
    chunk = max(1, across // (8 * tiles.threads)) if blocks == 1 else 1
    item = take(sync, phase, chunk)
    while item < items:
        end = min(item + chunk, items)
        for i in range(item, end):
            first = (i % blocks) * ROW_BLOCK
            last = min(first + ROW_BLOCK, rows)
            linear_tile(tiles, layer, i // blocks, first, last, inputs, sums, outputs, scratch)
        done(sync, phase, end - item)
        item = take(sync, phase, chunk)
    wait_for(sync, phase, items)
