"""The largest of every 48 logits, noted by the head while a tile's outputs are still near; the sampler then looks
only where a large one is. One that is not a number stands above all others, so that it shows."""

from functools import partial

import numpy as np
from llvmlite.ir import Constant, Undefined
from numba import types
from numba.extending import intrinsic

from millpond.kernels.jit import inner
from millpond.kernels.matmul import COLUMNS, ROWS, VECTORS
from millpond.kernels.simd import I32, I64, V16F32, V16I32, Ir, address, float_bits, float_from_bits, vector

# A float32's rank is an integer of the same order: its bits, those below the sign turned over where it is negative. NaN
# of a negative sign would be the least then; taking off as many as there are of them wraps them round to the top.
NEGATIVE_NANS = 0x7FFFFF
LEAST_RANK = -0x80000000


def _turned(b, words, const):
    return b.xor(words, b.and_(b.ashr(words, const(31)), const(0x7FFFFFFF)))


def _ranks(b, words, const):
    return b.sub(_turned(b, words, const), const(NEGATIVE_NANS))


def _words(b, ranks, const):
    """The opposite of _ranks."""
    return _turned(b, b.add(ranks, const(NEGATIVE_NANS)), const)


@intrinsic
def rank_of(typingctx, word):
    """The rank of a float32 of these bits, int32 both."""
    return types.int32(types.int32), lambda context, builder, signature, args: _ranks(builder, args[0], I32)


@intrinsic
def word_of(typingctx, rank):
    """The bits of the float32 of this rank."""
    return types.int32(types.int32), lambda context, builder, signature, args: _words(builder, args[0], I32)


@intrinsic
def note_tops(typingctx, rows, c, ldc, tops, ldtops):
    """tops[r] = the largest of C[r, 0:48], or not a number where one of these is not; float32, addresses, strides in
    bytes."""

    def codegen(context, builder, signature, args):
        ir, (rows, c, ldc, tops, ldtops) = Ir(builder), args

        def some_rows(first, together):
            at = [builder.add(first, I64(r)) for r in range(together)]
            found = _largest(ir, [_peaks(ir, ir.at(c, builder.mul(ldc, r))) for r in at])
            for r, value in zip(at, found, strict=True):
                ir.store(value, ir.at(tops, builder.mul(ldtops, r)))
            return []

        whole = builder.sdiv(rows, I64(ROWS))
        ir.loop(whole, [], lambda i, _: some_rows(ir.times(i, ROWS), ROWS))
        start = ir.times(whole, ROWS)
        ir.loop(builder.sub(rows, start), [], lambda i, _: some_rows(builder.add(start, i), 1))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _peaks(ir, c):
    """16 ranks of a row of a tile, the largest among them."""
    const = partial(ir.const, V16I32)
    ranks = [_ranks(ir.b, ir.b.bitcast(ir.load(V16F32, c, 64 * j), V16I32), const) for j in range(VECTORS)]
    peak = ranks[0]
    for each in ranks[1:]:
        peak = ir.larger(peak, each)
    return peak


def _largest(ir, peaks):
    """The float32 of the largest rank of each of 1, 2, 4, ... vectors. Two become one, of the larger of each pair of
    halves (then quarters, ...); when there is but one, its parts are halved in place."""
    b, part = ir.b, 16

    def folded(x, y):
        """The larger of the halves of all parts, those of x before those of y."""
        lanes = [start + i for start in range(0, 32, part) for i in range(part // 2)]
        orders = [[lane + shift for lane in lanes] for shift in (0, part // 2)]
        low, high = (b.shuffle_vector(x, y, Constant(vector(I32, 16), order)) for order in orders)
        return ir.larger(low, high)

    count = len(peaks)
    while len(peaks) > 1:
        peaks, part = [folded(*peaks[i : i + 2]) for i in range(0, len(peaks), 2)], part // 2
    (peak,) = peaks
    while part > 1:
        part //= 2
        order = Constant(vector(I32, 16), [lane ^ part for lane in range(16)])
        peak = ir.larger(peak, b.shuffle_vector(peak, Constant(peak.type, Undefined), order))
    values = b.bitcast(_words(b, peak, partial(ir.const, V16I32)), V16F32)
    return [b.extract_element(values, I32(i * (16 // count))) for i in range(count)]


@inner
def largest(x):
    """The largest of some float32, or not a number where one of them is not; -infinity of none."""
    top = np.int32(LEAST_RANK)
    for i in range(x.size):
        rank = rank_of(float_bits(x[i]))
        top = rank if rank > top else top
    return float_from_bits(word_of(top))


@inner
def row_tops(row, tops):
    """tops[t] = the largest of tile t of a row, the last tile being what is left of it."""
    whole = row.size // COLUMNS
    note_tops(whole, address(row), COLUMNS * 4, address(tops), 4)
    if whole < tops.size:
        tops[whole] = largest(row[whole * COLUMNS :])
