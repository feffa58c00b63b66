"""Calling compiled code by its address. A tile compiled on its own is optimised once; inlined into its callers it
would be optimised again in each of them, and the first start would take a minute instead of seconds."""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def entry_point(dispatcher, *argument_types) -> int:
    """The address of a jitted function that returns nothing, compiled (or loaded) for the given Numba types.

    The dispatcher must outlive the address.
    """
    dispatcher.compile(argument_types)
    overload = dispatcher.overloads[argument_types]
    return overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name)


def plain(kind):
    """The type that an argument is passed as: int64 for any integer, float32 for any other number, else its own."""
    if isinstance(kind, types.Integer | types.Boolean | types.IntegerLiteral):
        return types.int64
    return types.float32 if isinstance(kind, types.Float) else kind


@intrinsic
def call(typingctx, entry, *arguments):
    """Call the function at address `entry` (from entry_point) with the arguments as `plain` types."""
    kinds = tuple(plain(each) for each in arguments)

    def codegen(context, builder, signature, values):
        parts = cgutils.unpack_tuple(builder, values[1])
        function = context.call_conv.get_function_type(types.none, kinds)
        pointer = builder.inttoptr(values[0], function.as_pointer())
        status, _ = context.call_conv.call_function(builder, pointer, types.none, kinds, parts)
        with builder.if_then(status.is_error, likely=False):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, types.Tuple(kinds)), codegen
