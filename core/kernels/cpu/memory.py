"""What Numba has no word for: copying bytes as memcpy does, and asking for memory ahead of time.

Each function takes an array and a number of bytes from its start, and looks at neither its shape
nor its strides. As with bits.py, whoever changes this file has to clear ``__pycache__``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE = ir.IntType(8)
_INT = ir.IntType(32)

MAX_AHEAD_BYTES = 2048


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Return a byte pointer `at` bytes behind the start of an array."""
    start = context.make_array(kind)(context, builder, array).data
    return builder.gep(builder.bitcast(start, _BYTE.as_pointer()), [at])


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(
    typing_context: Any, target: Any, target_at: Any, source: Any, source_at: Any, count: Any
) -> Any:
    """Copy `count` bytes between places that do not overlap."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _address(context, builder, signature.args[0], args[0], args[1])
        source_ = _address(context, builder, signature.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, to, source_, args[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line `at` bytes behind the start of an array; any number will do."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _address(context, builder, signature.args[0], args[0], args[1])
        kind = ir.FunctionType(ir.VoidType(), [place.type, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = _INT(0), _INT(3), _INT(1)
        builder.call(function, [place, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), build


@njit(nogil=True, cache=True)
def prefetch_bytes(array, at, count):
    """Ask for the cache lines of `count` bytes that start `at` bytes behind an array's start.

    Of a long row only the beginning: by then the processor goes on by itself.
    """
    count = min(count, MAX_AHEAD_BYTES)
    for byte in range(0, count, 64):
        prefetch(array, at + byte)
    prefetch(array, at + count - 1)
