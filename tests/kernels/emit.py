"""Small compiled functions made in a test: what a primitive of `Ir` does to arrays, 16 lanes at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from millpond.kernels.isa import runnable, vectors_of
from millpond.kernels.simd import V16F32, V16I8, V16I16, V16I32, V32I16, V64I8, Ir

RUNNABLE_ISAS = runnable()
NARROW_ISAS = [isa for isa in RUNNABLE_ISAS if isa in ("avx2", "vnni256")]
BYTES = {V16F32: 64, V16I32: 64, V64I8: 64, V32I16: 64, V16I16: 32, V16I8: 16}


def counted_from(isa: str) -> int:
    """What the unsigned bytes of a dot product count from."""
    return 128 if isa == "avx2" else 0


def lanes(emit: Callable, inputs: list, output, isa: str = "portable") -> Callable[..., np.ndarray]:
    """A function of arrays: emit(ir, *vectors) over them. inputs and output are vector types; the arrays hold whole
    vectors, and the result comes as raw bytes [count, bytes of one vector]."""

    @intrinsic
    def run(typingctx, count, target, sources):
        def codegen(context, builder, signature, args):
            ir, (count, target, sources) = Ir(builder, vectors_of(isa)), args
            places = cgutils.unpack_tuple(builder, sources)

            def step(i, _):
                vectors = [
                    ir.load(kind, ir.at(place, ir.times(i, BYTES[kind])))
                    for kind, place in zip(inputs, places, strict=True)
                ]
                ir.store(emit(ir, *vectors), ir.at(target, ir.times(i, BYTES[output])))
                return []

            ir.loop(count, [], step)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, sources), codegen

    @njit
    def entry(count, target, sources):
        run(count, target, sources)

    def apply(*arrays: np.ndarray) -> np.ndarray:
        arrays = [np.ascontiguousarray(each) for each in arrays]
        counts = {each.nbytes // BYTES[kind] for each, kind in zip(arrays, inputs, strict=True)}
        assert all(each.nbytes % BYTES[kind] == 0 for each, kind in zip(arrays, inputs, strict=True))
        (count,) = counts
        target = np.zeros((count, BYTES[output]), np.uint8)
        entry(count, target.ctypes.data, tuple(each.ctypes.data for each in arrays))
        return target

    apply.assembly = lambda: "".join(entry.inspect_asm().values())
    return apply
