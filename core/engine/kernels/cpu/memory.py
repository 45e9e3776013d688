"""What Numba has no word for: memory by its address, copies as memcpy makes them, and prefetching.

An address is an int64. Nothing here looks at how long an array is, or at its shape or strides. As
with bits.py, whoever changes this file has to clear ``__pycache__``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import njit

_BYTE = ir.IntType(8)
_INT = ir.IntType(32)
_LONG = ir.IntType(64)

MAX_AHEAD_BYTES = 2048


def load(builder: Any, address: Any, kind: Any, at: int = 0) -> Any:
    """Write a load of a value or vector, `at` bytes behind an address of any alignment."""
    if at:
        address = builder.add(address, _LONG(at))
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


@intrinsic  # type: ignore[untyped-decorator]
def address_of(typing_context: Any, array: Any) -> Any:
    """Return the address at which an array starts."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _in_array(context, builder, signature.args[0], args[0], _LONG(0))

    return types.int64(array), build


def _loader(bits: int, returned: Any, signed: bool = False) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load_bits(typing_context: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x = load(builder, args[0], ir.IntType(bits))
            if bits == 64:
                return x
            return builder.sext(x, _LONG) if signed else builder.zext(x, _LONG)

        return returned(types.int64), build

    return load_bits


# The unsigned integer of so many bits at an address; those of 32 and 64 bits also as signed ones.
load_8 = _loader(8, types.int64)
load_16 = _loader(16, types.int64)
load_32 = _loader(32, types.int64)
load_64 = _loader(64, types.uint64)
load_signed = _loader(64, types.int64)
load_signed_32 = _loader(32, types.int64, signed=True)


@intrinsic  # type: ignore[untyped-decorator]
def call_at(typing_context: Any, address: Any) -> Any:
    """Call the C function at an address, which takes nothing and returns an int."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_INT, [])
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.sext(builder.call(function, []), _LONG)

    return types.int64(types.int64), build


def stack_memory(count: int) -> Any:
    """Return a function for compiled code that returns the address of `count` bytes.

    They start a line of the cache, hold anything, and last until the function that calls returns.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def address_of_stack(typing_context: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            # Not `cgutils.alloca_once`: it stores zeros, byte after byte in what LLVM makes of it,
            # which took 7 s to compile for some kilobytes.
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(_BYTE, count))
            memory.align = 64
            return builder.ptrtoint(memory, _LONG)

        return types.int64(), build

    return address_of_stack


@intrinsic  # type: ignore[untyped-decorator]
def store_signed(typing_context: Any, address: Any, x: Any) -> Any:
    """Write the int64 at an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _LONG.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


def _adder_of_zero(count: int) -> Any:
    """Return the function for so many floats."""

    @intrinsic  # type: ignore[untyped-decorator]
    def add_zero(typing_context: Any, like: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.VectorType(args[0].type, count)
            place = builder.inttoptr(args[1], kind.as_pointer())
            x = builder.fadd(builder.load(place, align=4), ir.Constant(kind, [0.0] * count))
            builder.store(x, place, align=4)
            return context.get_dummy_value()

        return types.void(like, types.int64), build

    return add_zero


# Each adds 0 to the floats at an address, which makes 0 of -0; `like` is any number of their type.
add_zero_1 = _adder_of_zero(1)
add_zero_16 = _adder_of_zero(16)


@intrinsic  # type: ignore[untyped-decorator]
def numbers_at(typing_context: Any, address: Any) -> Any:
    """Return an address as a pointer to int64, as ``numba.carray`` takes it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _LONG.as_pointer())

    return types.CPointer(types.int64)(types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def or_chunk(typing_context: Any, like: Any, address: Any, bits: Any) -> Any:
    """Set bits of the chunk at an address; `like` is any number of the type of such a chunk."""
    kind = ir.IntType(like.bitwidth)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = args[2] if kind.width == 64 else builder.trunc(args[2], kind)
        place = builder.inttoptr(args[1], kind.as_pointer())
        builder.store(builder.or_(builder.load(place, align=1), x), place, align=1)
        return context.get_dummy_value()

    return types.void(like, types.int64, types.uint64), build


@intrinsic  # type: ignore[untyped-decorator]
def store_chunk(typing_context: Any, like: Any, address: Any, bits: Any) -> Any:
    """Write the low bits of a number as the chunk at an address; `like` is as in `or_chunk`."""
    kind = ir.IntType(like.bitwidth)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = args[2] if kind.width == 64 else builder.trunc(args[2], kind)
        builder.store(x, builder.inttoptr(args[1], kind.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(like, types.int64, types.uint64), build


def _in_array(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Return the address `at` bytes behind the start of an array."""
    start = context.make_array(kind)(context, builder, array).data
    return builder.add(builder.ptrtoint(start, _LONG), at)


def _copy(builder: Any, target: Any, source: Any, count: Any) -> None:
    to, from_ = (builder.inttoptr(address, _BYTE.as_pointer()) for address in (target, source))
    cgutils.raw_memcpy(builder, to, from_, count, 1)


def _prefetch(builder: Any, address: Any) -> None:
    place = builder.inttoptr(address, _BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = _INT(0), _INT(3), _INT(1)
    builder.call(function, [place, read, keep, data])


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(
    typing_context: Any, target: Any, target_at: Any, source: Any, source_at: Any, count: Any
) -> Any:
    """Copy `count` bytes between places, so far behind the starts of arrays, without overlap."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _in_array(context, builder, signature.args[0], args[0], args[1])
        from_ = _in_array(context, builder, signature.args[2], args[2], args[3])
        _copy(builder, to, from_, args[4])
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def copy_between(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes from an address to another, between places that do not overlap."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _copy(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line `at` bytes behind the start of an array; any number will do."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, _in_array(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_line(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line of an address; any number will do."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), build


@njit(nogil=True, cache=True, forceinline=True)
def prefetch_lines(address, count):
    """Ask for the cache lines of `count` bytes at an address.

    Of a long row only the beginning: by then the processor goes on by itself.
    """
    last = address + count - 1
    end = address + min(count, MAX_AHEAD_BYTES)
    # Not one line at a time, which LLVM would unroll so far that short rows pay for it.
    while end - address > 128:
        prefetch_line(address)
        prefetch_line(address + 64)
        address += 128
    prefetch_line(address)
    prefetch_line(min(address + 64, last))
    prefetch_line(last)


@njit(nogil=True, cache=True)
def prefetch_bytes(array, at, count):
    """Ask for the cache lines of `count` bytes that start `at` bytes behind an array's start."""
    prefetch_lines(address_of(array) + at, count)
