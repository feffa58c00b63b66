"""A small vector language over LLVM IR: 16 lanes, addresses as integers, AVX512's dot products or a portable spelling.

The tiles in this package are Python functions that emit code through an `Ir`; no fast-math flag is ever set
on what they emit, so a row's result is the same whatever tile it went through.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from millpond.kernels.isa import AVX2, AVX512, PORTABLE, VNNI256, limits

I1, I8, I16, I32, I64, F32, F16 = (
    ir.IntType(1),
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.HalfType(),
)
LANES = 16
# Of Ir.exp and Ir.exp2: log2 e in two parts, the coefficients of f, f**2, ... in 2**f for -0.5 <= f <= 0.5 (least
# squares, weighted until the largest relative error was smallest: 9e-8), and 1.5 * 2**23 + 127, the exponent bias of a
# float32.
LOG2_E, LOG2_E_REST = 1.4426950216293335, 1.92596298909109e-08
EXP2 = (0.69314698, 0.24022242, 0.05550734, 0.00967151, 0.00132647)
SHIFT = 12583039.0
FLOAT_BIAS, FLOAT_MANTISSA = 127, 23  # of a float32's exponent, and the bits behind it


def vector(element, lanes=LANES):
    return ir.VectorType(element, lanes)


class _BFloat(ir.types.Type):
    """llvmlite has no bfloat type; LLVM does."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash("bfloat")


V8F32, V8I32 = vector(F32, 8), vector(I32, 8)
V16F32, V16I32, V16I16, V16I8, V64I8 = vector(F32), vector(I32), vector(I16), vector(I8), vector(I8, 64)
V16F16, V32F16, V32I16 = vector(F16), vector(F16, 32), vector(I16, 32)
V16BF16, V32BF16 = vector(_BFloat()), vector(_BFloat(), 32)
V32I8, V32I32 = vector(I8, 32), vector(I32, 32)


class Ir:
    """Emits 16-lane vector code through a llvmlite builder, for one of the instruction sets of isa.py, portably by
    default. For the 256-bit ones the function that it emits into may use nothing wider, whatever the processor has."""

    def __init__(self, builder, isa=PORTABLE):
        self.b, self.isa = builder, isa
        for name, value in limits(isa).items():
            # llvmlite knows only attributes that are single words; LLVM takes any pair of strings
            set.add(builder.function.attributes, f'"{name}"="{value}"')

    def together(self, count, most):
        """How many of `count` go through a loop together, so that their sums stay in registers: all of them, or where
        a vector of 16 lanes takes two of 16 registers, as many as divide count, up to `most`."""
        if self.isa not in (AVX2, VNNI256):
            return count
        return max(size for size in range(1, most + 1) if count % size == 0)

    # ---- constants, memory ----------------------------------------------------------------------------
    def const(self, ty, value):
        return ir.Constant(ty, [value] * ty.count)

    def zero(self):
        return self.const(V16F32, 0.0)

    def at(self, base, *offsets):
        for offset in offsets:
            if not isinstance(offset, int):
                base = self.b.add(base, offset)
            elif offset:
                base = self.b.add(base, I64(offset))
        return base

    def times(self, value, factor):
        return self.b.mul(value, I64(factor))

    def load(self, ty, address, offset=0):
        return self.b.load(self.b.inttoptr(self.at(address, offset), ty.as_pointer()), align=1)

    def store(self, value, address, offset=0):
        self.b.store(value, self.b.inttoptr(self.at(address, offset), value.type.as_pointer()), align=1)

    def prefetch(self, address, offset=0, near=3, writes=False):
        """Ask for the cache line at an address (any address: nothing faults) to be brought near: 3 for the first-level
        cache, 2 for the second. writes: to be written, so that no other core keeps it."""
        pointer = self.b.inttoptr(self.at(address, offset), I8.as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, I32(int(writes)), I32(near), I32(1))

    def in_place(self):
        """Keep what reads memory before here before it, and what reads it after here after it."""
        self.b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)

    def splat(self, value):
        undefined = ir.Constant(vector(value.type), ir.Undefined)
        first = self.b.insert_element(undefined, value, I32(0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(V16I32, [0] * LANES))

    def load_splat(self, ty, address, offset=0):
        return self.splat(self.load(ty, address, offset))

    # ---- arithmetic -----------------------------------------------------------------------------------
    def call(self, name, result, *args):
        function = cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(function, args)

    def fma(self, x, y, z):
        return self.call("llvm.fma.v16f32", V16F32, x, y, z)

    def select_max(self, x, y):
        """The larger of x and y; y where either is not a number."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def larger(self, x, y):
        """The larger of signed integers."""
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def magnitude(self, x):
        """|x| of <16 x float> as integers, which have the same order; NaN comes out on top."""
        return self.b.and_(self.b.bitcast(x, V16I32), self.const(V16I32, 0x7FFFFFFF))

    def nearest(self, x):
        """<16 x float> to <16 x i32>, to nearest even: adding 1.5 * 2**23 leaves the integer in the low bits."""
        shifted = self.b.fadd(x, self.const(V16F32, 12582912.0))
        return self.b.sub(self.b.bitcast(shifted, V16I32), self.const(V16I32, 0x4B400000))

    def half_to_float(self, h):
        """<16 x i16> holding float16 to <16 x float>, exactly. The portable spelling shifts the bits into a float32's
        place and multiplies by 2**112, the difference of the exponents' biases."""
        if self.isa != PORTABLE:
            return self.b.fpext(self.b.bitcast(h, V16F16), V16F32)
        wide = self.b.zext(h, V16I32)
        magnitude = self.b.shl(self.b.and_(wide, self.const(V16I32, 0x7FFF)), self.const(V16I32, 13))
        value = self.b.fmul(self.b.bitcast(magnitude, V16F32), self.const(V16F32, 2.0**112))
        sign = self.b.shl(self.b.and_(wide, self.const(V16I32, 0x8000)), self.const(V16I32, 16))
        return self.b.bitcast(self.b.or_(self.b.bitcast(value, V16I32), sign), V16F32)

    def to_bf16(self, x):
        """<16 x float> to bfloat16 bits <16 x i16>, to nearest even. AVX512's instruction makes what is below 2**-126 a
        zero."""
        if self.isa == AVX512:
            rounded = self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", V16BF16, x)
            return self.b.bitcast(rounded, V16I16)
        bits = self.b.bitcast(x, V16I32)
        odd = self.b.and_(self.b.lshr(bits, self.const(V16I32, 16)), self.const(V16I32, 1))
        rounded = self.b.add(self.b.add(bits, self.const(V16I32, 0x7FFF)), odd)
        return self.b.trunc(self.b.lshr(rounded, self.const(V16I32, 16)), V16I16)

    def bf16_pair(self, x):
        """The even and the odd bfloat16 of <16 x i32> as two <16 x float>."""
        low = self.b.shl(x, self.const(V16I32, 16))
        high = self.b.and_(x, self.const(V16I32, -65536))
        return self.b.bitcast(low, V16F32), self.b.bitcast(high, V16F32)

    def halves(self, x):
        """The lower and the upper half of a vector."""
        undefined, half = ir.Constant(x.type, ir.Undefined), x.type.count // 2
        orders = [ir.Constant(vector(I32, half), list(range(first, first + half))) for first in (0, half)]
        return [self.b.shuffle_vector(x, undefined, order) for order in orders]

    def by_halves(self, name, result, *args):
        """Call an intrinsic of 256 bits on both halves of its arguments; result: the type of one half's."""
        return self.joined(*(self.call(name, result, *pair) for pair in zip(*map(self.halves, args), strict=True)))

    def in_order(self, x):
        """x, as a sum that LLVM does not see through: it turns long sums of integers into trees, whose many leaves do
        not fit into 16 registers."""
        low, high = self.halves(x)
        hidden = ir.FunctionType(low.type, [low.type])
        return self.joined(*(self.b.asm(hidden, "", "=x,0", [half], side_effect=False) for half in (low, high)))

    def joined(self, low, high):
        """The opposite of halves."""
        count = 2 * low.type.count
        return self.b.shuffle_vector(low, high, ir.Constant(vector(I32, count), list(range(count))))

    def dot_u8s8(self, acc, weights, activations):
        """acc[i] += sum over 4 bytes of unsigned weights[4i + k] * signed activations[4i + k]; <16 x i32> each. On AVX2
        the weights count from 128, neither being the lowest of its kind (see dot_start)."""
        b = self.b
        if self.isa == AVX512:
            w, a = b.bitcast(weights, V64I8), b.bitcast(activations, V64I8)
            return self.call("llvm.x86.avx512.vpdpbusd.512", V16I32, acc, w, a)
        if self.isa == VNNI256:
            w, a = b.bitcast(weights, V64I8), b.bitcast(activations, V64I8)
            return self.by_halves("llvm.x86.avx512.vpdpbusd.256", V8I32, acc, w, a)
        if self.isa == AVX2:
            w = b.xor(b.bitcast(weights, V64I8), self.const(V64I8, -128))
            a = b.bitcast(activations, V64I8)
            magnitude = b.select(b.icmp_signed("<", a, self.const(V64I8, 0)), b.sub(self.const(V64I8, 0), a), a)
            # two products of at most 127 * 127 fit into 16 bits; unsigned weights would not
            signed = self.by_halves("llvm.x86.avx2.psign.b", V32I8, w, a)
            pairs = self.by_halves("llvm.x86.avx2.pmadd.ub.sw", V16I16, magnitude, signed)
            sums = self.by_halves("llvm.x86.avx2.pmadd.wd", V8I32, pairs, self.const(V32I16, 1))
            return self.in_order(b.add(acc, sums))
        for k in range(4):
            up, down = self.const(V16I32, 24 - 8 * k), self.const(V16I32, 24)
            w = b.lshr(b.shl(weights, up), down)
            a = b.ashr(b.shl(activations, up), down)
            acc = b.add(acc, b.mul(w, a))
        return acc

    def dot_whole_u8s8(self, acc, unsigned, signed):
        """dot_u8s8 without its limits on AVX2."""
        if self.isa != AVX2:
            return self.dot_u8s8(acc, unsigned, signed)
        b, eight = self.b, self.const(V32I16, 8)
        u, s = b.bitcast(unsigned, V32I16), b.bitcast(signed, V32I16)
        even = b.and_(u, self.const(V32I16, 255)), b.ashr(b.shl(s, eight), eight)
        for u_, s_ in (even, (b.lshr(u, eight), b.ashr(s, eight))):
            acc = self.in_order(b.add(acc, self.by_halves("llvm.x86.avx2.pmadd.wd", V8I32, u_, s_)))
        return acc

    def dot_start(self, correction):
        """What a chain of dot_u8s8 starts from, so that it sums (weights - 128) * activations for weights from 1 on:
        -128 times the sum of the activations, or 0 where the dot counts weights from 128 itself."""
        return self.const(V16I32, 0) if self.isa == AVX2 else correction

    def high_product(self, x, y):
        """The upper 16 bits of unsigned products; <32 x i16> each."""
        wide = self.b.mul(self.b.zext(x, V32I32), self.b.zext(y, V32I32))
        return self.b.trunc(self.b.lshr(wide, self.const(V32I32, 16)), V32I16)

    def look_up(self, table, places):
        """table[places % 32] by AVX512; <32 x half> and <32 x i16>."""
        found = self.call("llvm.x86.avx512.permvar.hi.512", V32I16, self.b.bitcast(table, V32I16), places)
        return self.b.bitcast(found, V32F16)

    def dot_bf16(self, acc, x, y):
        """acc[i] += x[2i] * y[2i] + x[2i + 1] * y[2i + 1]; x and y are <16 x i32> of bfloat16 pairs."""
        if self.isa == AVX512:
            x, y = self.b.bitcast(x, V32BF16), self.b.bitcast(y, V32BF16)
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", V16F32, acc, x, y)
        (x0, x1), (y0, y1) = self.bf16_pair(x), self.bf16_pair(y)
        return self.fma(x0, y0, self.fma(x1, y1, acc))

    def exp(self, x):
        """e**x for x <= 88, to about 2 units in the last place, and not a number where x is not a number."""
        c = lambda value: self.const(V16F32, value)  # noqa: E731
        x = self._at_least(x, -87.0)
        shifted = self.fma(x, c(LOG2_E), c(SHIFT))
        n = self.b.fsub(shifted, c(SHIFT))
        return self._power(shifted, self.fma(x, c(LOG2_E_REST), self.fma(x, c(LOG2_E), self.b.fsub(c(-0.0), n))))

    def exp2(self, x):
        """2**x for x <= 127, as near as x is, and not a number where x is not a number."""
        x, shift = self._at_least(x, -125.5), self.const(V16F32, SHIFT)
        shifted = self.b.fadd(x, shift)
        return self._power(shifted, self.b.fsub(x, self.b.fsub(shifted, shift)))

    def power_of_two(self, power):
        """2**power, of an int64 from -126 to 127."""
        bits = self.b.shl(self.b.add(power, I64(FLOAT_BIAS)), I64(FLOAT_MANTISSA))
        return self.splat(self.b.bitcast(self.b.trunc(bits, I32), F32))

    def _at_least(self, x, least):
        bound = self.const(V16F32, least)
        return self.b.select(self.b.fcmp_ordered("<", x, bound), bound, x)

    def _power(self, shifted, f):
        """2**(n + f), where adding SHIFT left n in the low bits of `shifted`, as the exponent of 2**n; a polynomial of
        degree 5 of f."""
        y = self.const(V16F32, EXP2[-1])
        for coefficient in (*EXP2[-2::-1], 1.0):
            y = self.fma(y, f, self.const(V16F32, coefficient))
        power = self.b.shl(self.b.bitcast(shifted, V16I32), self.const(V16I32, 23))
        return self.b.fmul(y, self.b.bitcast(power, V16F32))

    def reduce(self, combine, value):
        """One scalar from 16 lanes by a fixed tree: lanes i and i + 8, then 4, 2, 1."""
        undefined = ir.Constant(value.type, ir.Undefined)
        for step in (8, 4, 2, 1):
            order = ir.Constant(V16I32, [(i + step) % LANES for i in range(LANES)])
            value = combine(value, self.b.shuffle_vector(value, undefined, order))
        return self.b.extract_element(value, I32(0))

    # ---- control --------------------------------------------------------------------------------------
    def loop(self, count, carried, body):
        """carried = body(i, carried) for i in range(count); returns the last carried values."""
        b, entry = self.b, self.b.block
        head, done = b.append_basic_block("loop"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", count, I64(0)), head, done)
        b.position_at_end(head)
        i = self._phi(I64, entry, I64(0))
        current = [self._phi(value.type, entry, value) for value in carried]
        result = body(i, current)
        following, tail = b.add(i, I64(1)), b.block
        for phi, value in zip([i, *current], [following, *result], strict=True):
            phi.add_incoming(value, tail)
        b.cbranch(b.icmp_signed("<", following, count), head, done)
        b.position_at_end(done)
        last = [self._phi(value.type, entry, value) for value in carried]
        for phi, value in zip(last, result, strict=True):
            phi.add_incoming(value, tail)
        return last

    def _phi(self, ty, block, value):
        phi = self.b.phi(ty)
        phi.add_incoming(value, block)
        return phi


# ---- scalar bits and addresses, for use in Numba functions ------------------------------------------------
@intrinsic
def address(typingctx, array, *places):
    """The address of an array's first element, or of that at these places (int64) along its first axes, as a signed
    integer (Numba would make float64 of unsigned + signed). Negative places do not count from the end. A view of the
    places would be hundreds of instructions to be compiled."""
    assert len(places) <= array.ndim, "more places than axes"
    assert all(isinstance(each, types.Integer) for each in places), "a place is an integer"

    def codegen(context, builder, signature, args):
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        place, strides = builder.ptrtoint(struct.data, I64), cgutils.unpack_tuple(builder, struct.strides)
        for index, stride in zip(cgutils.unpack_tuple(builder, args[1]), strides, strict=False):
            place = builder.add(place, builder.mul(index, stride))
        return place

    kinds = types.Tuple([types.int64] * len(places))
    return types.int64(array, kinds), codegen


@intrinsic
def float_bits(typingctx, x):
    """The bits of a float32 as int32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], I32)


@intrinsic
def float_from_bits(typingctx, x):
    """The float32 with the given int32 bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)


@intrinsic
def float_at(typingctx, where):
    """The float32 at an address."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], F32.as_pointer()))

    return types.float32(types.int64), codegen


@intrinsic
def int_at(typingctx, where):
    """The int64 at an address."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], I64.as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def byte_at(typingctx, where):
    """The unsigned byte at an address."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.load(builder.inttoptr(args[0], I8.as_pointer())), I64)

    return types.int64(types.int64), codegen


@intrinsic
def short_at(typingctx, where):
    """The unsigned 16-bit number at an address."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.load(builder.inttoptr(args[0], I16.as_pointer())), I64)

    return types.int64(types.int64), codegen


@intrinsic
def put_float(typingctx, where, value):
    """Store a float32 at an address."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen
