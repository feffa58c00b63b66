"""Named tuples of arrays by their address. As values they are hundreds of arguments of every call, and passing them on
is most of what LLVM would work at; and Python's callers would hand over each of them in every step.

    in memory, 64 bits each: a number, or of an array its address, its shape, its strides
"""

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, register_model
from numba.np.arrayobj import make_array, populate_array

from millpond.kernels.simd import F32, I32, I64

Fields = TypeVar("Fields", bound=NamedTuple)
WORD = 8


class Referred(Generic[Fields]):
    """A named tuple of integers, float32 and arrays, and the address by which compiled code reads it. The numbers are
    those at the time when this was made; this must outlive the address."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self._words = np.array([word for field in fields for word in _words(field)], np.int64)
        self.address: int = self._words.ctypes.data


def _words(field: Any) -> tuple[int, ...]:
    if isinstance(field, np.ndarray):
        return field.__array_interface__["data"][0], *field.shape, *field.strides
    return (int(field.view(np.int32)) if isinstance(field, np.float32) else int(field),)


class Reference(types.Type):
    """The address of a named tuple of Numba type `kind`, whose fields are read by their names as if it were here."""

    def __init__(self, kind: types.NamedTuple) -> None:
        self.kind = kind
        super().__init__(f"Reference({kind})")

    @property
    def key(self) -> types.Type:
        return self.kind

    def place(self, name: str) -> int:
        """At which word a field begins."""
        before = self.kind.types[: self.kind.fields.index(name)]
        return sum(1 + 2 * each.ndim if isinstance(each, types.Array) else 1 for each in before)

    def field(self, name: str) -> types.Type:
        return self.kind.types[self.kind.fields.index(name)]


def reference_to(fields: NamedTuple, *, any_strides: bool = False) -> Reference:
    """The type of a reference to named tuples like this one; with any_strides to such whose arrays have any, where
    this one's may have those of C order by chance."""
    kind = typeof(fields)
    if any_strides:
        parts = [types.Array(each.dtype, each.ndim, "A") for each in kind.types]
        kind = types.NamedTuple(parts, kind.instance_class)
    return Reference(kind)


@register_model(Reference)
class _ReferenceModel(models.PrimitiveModel):
    """An address is an integer, as everywhere in this package."""

    def __init__(self, manager, kind):
        super().__init__(manager, kind, I64)


@infer_getattr
class _ReferenceFields(AttributeTemplate):
    key = Reference

    def generic_resolve(self, reference, name):
        return reference.field(name) if name in reference.kind.fields else None


@lower_getattr_generic(Reference)
def _read_field(context, builder, reference, address, name):
    kind, place = reference.field(name), reference.place(name)
    constant = builder.module.add_metadata([])

    def word(index):
        at = builder.add(address, I64(WORD * (place + index)))
        loaded = builder.load(builder.inttoptr(at, I64.as_pointer()))
        loaded.set_metadata("invariant.load", constant)  # no step writes over what refers to its arrays
        return loaded

    if not isinstance(kind, types.Array):
        return builder.bitcast(builder.trunc(word(0), I32), F32) if kind == types.float32 else word(0)
    array = make_array(kind)(context, builder)
    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    populate_array(
        array,
        data=builder.inttoptr(word(0), array.data.type),
        shape=[word(1 + axis) for axis in range(kind.ndim)],
        strides=[word(1 + kind.ndim + axis) for axis in range(kind.ndim)],
        itemsize=ir.Constant(I64, itemsize),
        meminfo=None,
    )
    return array._getvalue()
