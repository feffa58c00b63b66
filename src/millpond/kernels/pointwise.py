"""What happens to one row between the matrix products: norms, rotation, activation, quantisation, the K/V write."""

from functools import reduce
from math import pi

import numpy as np
from llvmlite.ir import Constant
from numba import njit, types
from numba.extending import intrinsic

from millpond.kernels.attention_int8 import put_key_int8, put_value_int8
from millpond.kernels.jit import OPTIONS, compiled
from millpond.kernels.matmul import (
    AMX_U4,
    BF16,
    DEPTH,
    F32_WEIGHTS,
    GROUP,
    KIND,
    MAGNITUDES,
    OUTLIER_COUNT,
    OUTLIERS,
    PAIR_ORDER,
    POWER,
    U8,
    ZERO_CODE,
)
from millpond.kernels.simd import (
    F32,
    I32,
    I64,
    V8F32,
    V8I32,
    V16F32,
    V16I8,
    V16I32,
    Ir,
    address,
    float_at,
    float_bits,
    int_at,
    put_float,
)

# Sums may be taken in another order (one order per loop, the same for every row); NaN and infinity stay what they are.
RELAXED = {"reassoc", "contract", "nsz"}
VANISHING = 2.0**-120  # 127 divided by less may be infinite
# 1 - erf(x) = exp(-x**2) * (ERF[0] t + ERF[1] t**2 + ...), t = 1 / (1 + ERF_P x), for x >= 0.
ERF_P, ERF = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


@intrinsic
def quantise_group(typingctx, x, codes, sums):
    """64 floats at x to signed 8-bit codes round(x / scale), scale = max |x| / 127; sums = [float32 scale, int32 -128 *
    sum of codes].

    A value that is not finite makes the scale not finite, so that it shows in whatever is computed from the group.
    Where all are below VANISHING, the codes are 0.
    """

    def codegen(context, builder, signature, args):
        ir, (x, codes, sums) = Ir(builder), args
        values = [ir.load(V16F32, x, 64 * i) for i in range(GROUP // 16)]
        peak = builder.bitcast(ir.reduce(ir.larger, reduce(ir.larger, map(ir.magnitude, values))), F32)
        scale = builder.fmul(peak, F32(np.float32(1 / 127)))
        vanishes = builder.fcmp_ordered("<", peak, F32(VANISHING))
        inverse = ir.splat(builder.select(vanishes, F32(0.0), builder.fdiv(F32(127.0), peak)))
        total = ir.const(V16I32, 0)
        for i, v in enumerate(values):
            integer = ir.nearest(builder.fmul(v, inverse))
            ir.store(builder.trunc(integer, V16I8), codes, 16 * i)
            total = builder.add(total, integer)
        ir.store(scale, sums)
        ir.store(builder.mul(ir.reduce(builder.add, total), I32(-ZERO_CODE)), sums, 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def round_row(typingctx, x, target, count):
    """16 * count floats at x to bfloat16 at target."""

    def codegen(context, builder, signature, args):
        ir, (x, target, count) = Ir(builder), args

        def some(i, _):
            ir.store(ir.to_bf16(ir.load(V16F32, ir.at(x, ir.times(i, 64)))), ir.at(target, ir.times(i, 32)))
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def round_for_amx(typingctx, x, power, target, count):
    """16 * count floats at x, times 2 ** power, to bfloat16 at target, each 16 in PAIR_ORDER: the inputs of integer
    weights."""

    def codegen(context, builder, signature, args):
        ir, (x, power, target, count) = Ir(builder), args
        factor = ir.power_of_two(power)

        def some(i, _):
            values = ir.to_bf16(builder.fmul(ir.load(V16F32, ir.at(x, ir.times(i, 64))), factor))
            values = builder.shuffle_vector(values, values, Constant(V16I32, PAIR_ORDER))
            ir.store(values, ir.at(target, ir.times(i, 32)))
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def copy_row(typingctx, x, target, count):
    """16 * count floats at x to target."""

    def codegen(context, builder, signature, args):
        ir, (x, target, count) = Ir(builder), args

        def some(i, _):
            ir.store(ir.load(V16F32, ir.at(x, ir.times(i, 64))), ir.at(target, ir.times(i, 64)))
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def add_row(typingctx, x, target, count):
    """target += x for 16 * count floats."""

    def codegen(context, builder, signature, args):
        ir, (x, target, count) = Ir(builder), args

        def some(i, _):
            place = ir.at(target, ir.times(i, 64))
            ir.store(builder.fadd(ir.load(V16F32, place), ir.load(V16F32, ir.at(x, ir.times(i, 64)))), place)
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def add_scaled(typingctx, x, factor, target, count):
    """target += factor * x for 16 * count floats."""

    def codegen(context, builder, signature, args):
        ir, (x, factor, target, count) = Ir(builder), args
        factor = ir.splat(factor)

        def some(i, _):
            place = ir.at(target, ir.times(i, 64))
            ir.store(ir.fma(factor, ir.load(V16F32, ir.at(x, ir.times(i, 64))), ir.load(V16F32, place)), place)
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), codegen


@intrinsic
def scale_row(typingctx, x, factor, count):
    """x *= factor for 16 * count floats."""

    def codegen(context, builder, signature, args):
        ir, (x, factor, count) = Ir(builder), args
        factor = ir.splat(factor)

        def some(i, _):
            place = ir.at(x, ir.times(i, 64))
            ir.store(builder.fmul(factor, ir.load(V16F32, place)), place)
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


def _over_one_and_exp(ir, x, y):
    """x / (1 + exp(y)) of vectors."""
    one, most = ir.const(V16F32, 1.0), ir.const(V16F32, 88.0)
    e = ir.exp(ir.b.select(ir.b.fcmp_ordered(">", y, most), most, y))
    return ir.b.fdiv(x, ir.b.fadd(one, e))


def silu(ir, x):
    """x / (1 + exp(-x)) of a vector."""
    return _over_one_and_exp(ir, x, ir.b.fsub(ir.const(V16F32, -0.0), x))


def gelu_by_tanh(ir, x):
    """x / (1 + exp(-2 z)) of a vector, z = sqrt(2 / pi) * (x + 0.044715 x**3): the tanh form of GELU."""
    linear, cubic = (ir.const(V16F32, -2 * (2 / pi) ** 0.5 * factor) for factor in (1.0, 0.044715))
    return _over_one_and_exp(ir, x, ir.b.fmul(x, ir.fma(ir.b.fmul(x, x), cubic, linear)))


def capped(ir, x, scale, cap):
    """cap * tanh(scale * x / cap) of <16 x float>; tanh(y) = 1 - 2 / (1 + exp(2 y))."""
    b, one = ir.b, ir.const(V16F32, 1.0)
    y = b.fmul(x, ir.splat(b.fdiv(b.fmul(F32(2.0), scale), cap)))
    return b.fmul(ir.splat(cap), b.fsub(one, _over_one_and_exp(ir, ir.const(V16F32, 2.0), y)))


@intrinsic
def cap_row(typingctx, x, scale, cap, count):
    """x = cap * tanh(scale * x / cap) for 16 * count floats."""

    def codegen(context, builder, signature, args):
        ir, (x, scale, cap, count) = Ir(builder), args

        def some(i, _):
            place = ir.at(x, ir.times(i, 64))
            ir.store(capped(ir, ir.load(V16F32, place), scale, cap), place)
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.float32, types.int64), codegen


@intrinsic
def geglu_row(typingctx, gate, up, target, count):
    """target = gelu(gate) * up for 16 * count floats."""

    def codegen(context, builder, signature, args):
        ir, (gate, up, target, count) = Ir(builder), args

        def some(i, _):
            x, u = (ir.load(V16F32, ir.at(p, ir.times(i, 64))) for p in (gate, up))
            ir.store(builder.fmul(gelu_by_tanh(ir, x), u), ir.at(target, ir.times(i, 64)))
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def gelu_row(typingctx, x, target, count):
    """target = x * Phi(x) for 16 * count floats, Phi(x) = (1 + erf(x / sqrt(2))) / 2: GELU's exact form.

    Phi(-|x|) is a polynomial of 1 / (1 + P |x|) times exp(-x**2 / 2), to 8e-8 (Abramowitz and Stegun, 7.1.26).
    """

    def codegen(context, builder, signature, args):
        ir, (x, target, count) = Ir(builder), args
        zero, one, minus_half = ir.zero(), ir.const(V16F32, 1.0), ir.const(V16F32, -0.5)

        def some(i, _):
            value = ir.load(V16F32, ir.at(x, ir.times(i, 64)))
            size = builder.bitcast(ir.magnitude(value), V16F32)
            t = builder.fdiv(one, ir.fma(size, ir.const(V16F32, ERF_P / 2**0.5), one))
            tail = ir.const(V16F32, ERF[-1] / 2)
            for coefficient in ERF[-2::-1]:
                tail = ir.fma(tail, t, ir.const(V16F32, coefficient / 2))
            exponential = ir.exp(builder.fmul(builder.fmul(value, value), minus_half))
            tail = builder.fmul(builder.fmul(tail, t), exponential)
            share = builder.select(builder.fcmp_ordered(">", value, zero), builder.fsub(one, tail), tail)
            ir.store(builder.fmul(value, share), ir.at(target, ir.times(i, 64)))
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def swiglu_row(typingctx, gate, up, target, count):
    """target = silu(gate) * up for 16 * count floats."""

    def codegen(context, builder, signature, args):
        ir, (gate, up, target, count) = Ir(builder), args

        def some(i, _):
            x, u = (ir.load(V16F32, ir.at(p, ir.times(i, 64))) for p in (gate, up))
            ir.store(builder.fmul(silu(ir, x), u), ir.at(target, ir.times(i, 64)))
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@compiled
def prepare(layer, x, first, target, sums):
    """The channels first, first + 1, ... (whole groups; float32 x, overwritten) of a row as a linear layer's input.

    target, sums: the addresses of the row. Integer kinds take signed 8-bit codes in target, and in sums what
    quantise_group says for each group, then the values of the layer's outlier channels; others float32 or bfloat16 (for
    AMX as round_for_amx says).
    """
    kind, depth = layer[KIND], layer[DEPTH]
    if layer[MAGNITUDES]:
        for i in range(x.size):
            total = layer[MAGNITUDES] + 4 * (first + i)
            put_float(total, float_at(total) + abs(x[i]))
    if kind <= U8:
        for o in range(layer[OUTLIER_COUNT]):
            channel = int_at(layer[OUTLIERS] + 8 * o) - first
            if 0 <= channel < x.size:
                put_float(sums + depth // GROUP * 8 + 4 * o, x[channel])
                x[channel] = 0
        for g in range(x.size // GROUP):
            group = first // GROUP + g
            quantise_group(address(x) + g * GROUP * 4, target + group * GROUP, sums + group * 8)
    elif AMX_U4 <= kind < AMX_U4 + BF16:
        round_for_amx(address(x), layer[POWER], target + 2 * first, x.size // 16)
    elif kind != F32_WEIGHTS:
        round_row(address(x), target + 2 * first, x.size // 16)
    else:
        copy_row(address(x), target + 4 * first, x.size // 16)


@njit(cache=True, fastmath=RELAXED, **OPTIONS)
def rms_norm(x, gain, epsilon, target):
    """target = x / sqrt(mean(x**2) + epsilon) * gain; float32 rows. Not a number where the squares overflow."""
    total = np.float32(0)
    for i in range(gain.size):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(gain.size) + epsilon)
    if not total < np.inf:  # isfinite subtracts total from itself, which these liberties may make 0
        factor = np.float32(np.nan)  # 1 / infinity would hide the overflow in a row of zeros
    for i in range(gain.size):
        target[i] = x[i] * factor * gain[i]


@njit(cache=True, fastmath=RELAXED, **OPTIONS)
def layer_norm(x, gain, bias, epsilon, target):
    """target = (x - mean(x)) / sqrt(var(x) + epsilon) * gain + bias; float32 rows. Not a number where the squares
    overflow."""
    total, squares = np.float32(0), np.float32(0)
    for i in range(gain.size):
        total += x[i]
    mean = total / np.float32(gain.size)
    for i in range(gain.size):
        squares += (x[i] - mean) * (x[i] - mean)
    factor = np.float32(1) / np.sqrt(squares / np.float32(gain.size) + epsilon)
    if not squares < np.inf:
        factor = np.float32(np.nan)  # as in rms_norm
    for i in range(gain.size):
        target[i] = (x[i] - mean) * factor * gain[i] + bias[i]


@intrinsic
def rotate_row(typingctx, x, cosine, sine, target, half):
    """target = x turned: pairs are (x[i], x[i + half]); half is a multiple of 8."""

    def codegen(context, builder, signature, args):
        ir, (x, cosine, sine, target, half) = Ir(builder), args

        def some(i, _):
            low = ir.times(i, 32)
            high = builder.add(low, ir.times(half, 4))
            a, b, c, s = (ir.load(V8F32, ir.at(*p)) for p in ((x, low), (x, high), (cosine, low), (sine, low)))
            ir.store(builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), ir.at(target, low))
            ir.store(builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), ir.at(target, high))
            return []

        ir.loop(builder.sdiv(half, I64(8)), [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@compiled
def rotate(x, cosine, sine, target):
    """Rotary embedding of one head: pairs are (x[i], x[i + half]); cosine, sine: float32 [half] of the position."""
    rotate_row(address(x), address(cosine), address(sine), address(target), cosine.size)


@intrinsic
def put_key(typingctx, x, target, count):
    """16 * count floats at x as pairs of bfloat16, a cache line from one pair to the next."""

    def codegen(context, builder, signature, args):
        ir, (x, target, count) = Ir(builder), args

        def some(i, _):
            pairs = builder.bitcast(ir.to_bf16(ir.load(V16F32, ir.at(x, ir.times(i, 64)))), V8I32)
            for pair in range(8):
                ir.store(builder.extract_element(pairs, I32(pair)), ir.at(target, ir.times(i, 8 * 64)), 64 * pair)
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def put_value(typingctx, x, target, count):
    """16 * count floats at x as bfloat16, 4 bytes from one to the next (another thread may write what is between)."""

    def codegen(context, builder, signature, args):
        ir, (x, target, count) = Ir(builder), args

        def some(i, _):
            values = ir.to_bf16(ir.load(V16F32, ir.at(x, ir.times(i, 64))))
            for lane in range(16):
                ir.store(builder.extract_element(values, I32(lane)), ir.at(target, ir.times(i, 64)), 4 * lane)
            return []

        ir.loop(count, [], some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@compiled
def to_bf16(x):
    """A float32 as bfloat16 bits, to nearest even."""
    bits = np.int64(float_bits(x)) & 0xFFFFFFFF
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@compiled
def write_key(x, block, scales, offset):
    """Put a head's key at one of the 16 positions of its block (attention.py; bfloat16 has an axis for the pairs, a
    block of 8 bits is a run of bytes, and its scales another)."""
    if block.ndim == 1:
        put_key_int8(address(x), address(block), address(scales), offset, x.size)
    elif block.ndim == 3:
        put_key(address(x), address(block) + 4 * offset, block.shape[0] // 8)
    else:
        for d in range(block.shape[0]):
            block[d, offset] = x[d]


@compiled
def write_value(x, block, scales, offset, cleared):
    """Put a head's value at one of the 16 positions of its block, and zeros at the next `cleared` positions.

    What is beyond a sequence's end in its last block is multiplied by 0, so it must not be a leftover (which may be
    not a number; 8 bits always are).
    """
    if block.ndim == 1:
        put_value_int8(address(x), address(block), address(scales), offset, x.size)
    elif block.ndim == 3:
        dim = block.shape[1]
        put_value(address(x), address(block) + offset // 2 * dim * 4 + offset % 2 * 2, dim // 16)
        for after in range(offset + 1, offset + 1 + cleared):
            block[after // 2, :, after % 2] = 0
    else:
        for d in range(block.shape[1]):
            block[offset, d] = x[d]
        block[offset + 1 : offset + 1 + cleared] = 0
