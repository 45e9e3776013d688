"""What Numba has no word for in zvc.py: 32 elements compared with zero, compressed and expanded.

Elements are unsigned integers of 8, 16, 32 or 64 bits, at any address. Where the processor has the
instructions of AVX-512 (VBMI2) they are used, else one element is done after the other, without a
branch. As with bits.py, whoever changes this file has to clear ``__pycache__``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .bytefields import available
from .groups import vector, zero

WORD = 32
_VECTOR_BITS = 512

_INT = ir.IntType(32)
_LONG = ir.IntType(64)


def _place(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: int = 1) -> Any:
    """Return a pointer to `count` elements of an array."""
    start = builder.ptrtoint(context.make_array(kind)(context, builder, array).data, _LONG)
    width = kind.dtype.bitwidth
    address = builder.add(start, builder.mul(at, _LONG(width // 8)))
    target = vector(width, count) if count > 1 else ir.IntType(width)
    return builder.inttoptr(address, target.as_pointer())


def _load_word(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.load(_place(context, builder, kind, array, at, WORD), align=1)


def _word(builder: Any, x: Any) -> Any:
    """Return which entries of a vector are not zero: bit i of entry i."""
    return builder.bitcast(builder.icmp_unsigned("!=", x, zero(x.type)), _INT)


def _pieces(builder: Any, word: Any, width: int) -> Any:
    """Yield, for each vector of a register's width in a word: first entry, entries, their mask."""
    count = min(WORD, _VECTOR_BITS // width)
    for first in range(0, WORD, count):
        part = builder.trunc(builder.lshr(word, _INT(first)), ir.IntType(count))
        yield first, count, builder.bitcast(part, vector(1, count))


def _ones(builder: Any, mask: Any) -> Any:
    """Return how many entries of a mask are set."""
    bits = builder.bitcast(mask, ir.IntType(mask.type.count))
    if mask.type.count < 32:
        bits = builder.zext(bits, _INT)
    return builder.zext(builder.ctpop(bits), _LONG)


def _bit(builder: Any, word: Any, j: int) -> Any:
    return builder.and_(builder.lshr(word, _INT(j)), _INT(1))


@intrinsic  # type: ignore[untyped-decorator]
def word_of(typing_context: Any, x: Any, first: Any) -> Any:
    """Return the bitmap of the 32 elements from `first` on: bit i is 1 where element i is not 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _word(builder, _load_word(context, builder, signature.args[0], args[0], args[1]))

    return types.uint32(x, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def count_ones(typing_context: Any, word: Any) -> Any:
    """Return the number of set bits of a uint32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.ctpop(args[0]), _LONG)

    return types.int64(types.uint32), build


def compressor(vectors: bool) -> Any:
    """Return `compress_word`, with the instructions of AVX-512 or without."""

    @intrinsic  # type: ignore[untyped-decorator]
    def compress_word(typing_context: Any, x: Any, first: Any, kept: Any, at: Any) -> Any:
        """Write those of 32 elements of `x` that are not zero to `kept`; return how many.

        Up to 32 elements of `kept` from `at` on are written to.
        """

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_kind, _, kept_kind, _ = signature.args
            width = x_kind.dtype.bitwidth
            x = _load_word(context, builder, x_kind, args[0], args[1])
            word = _word(builder, x)
            next_at = args[3]
            if not vectors:
                for j in range(WORD):
                    place = _place(context, builder, kept_kind, args[2], next_at)
                    builder.store(builder.extract_element(x, _INT(j)), place, align=1)
                    next_at = builder.add(next_at, builder.zext(_bit(builder, word, j), _LONG))
                return builder.sub(next_at, args[3])
            for first, count, mask in _pieces(builder, word, width):
                places = ir.Constant(vector(32, count), list(range(first, first + count)))
                some = builder.shuffle_vector(x, x, places)
                name = f"llvm.x86.avx512.mask.compress.v{count}i{width}"
                kind = ir.FunctionType(some.type, [some.type, some.type, mask.type])
                function = cgutils.get_or_insert_function(builder.module, kind, name)
                found = builder.call(function, [some, zero(some.type), mask])
                place = _place(context, builder, kept_kind, args[2], next_at, count)
                builder.store(found, place, align=1)
                next_at = builder.add(next_at, _ones(builder, mask))
            return builder.sub(next_at, args[3])

        return types.int64(x, types.int64, kept, types.int64), build

    return compress_word


def expander(vectors: bool) -> Any:
    """Return `expand_word`, with the instructions of AVX-512 or without."""

    @intrinsic  # type: ignore[untyped-decorator]
    def expand_word(
        typing_context: Any, word: Any, values: Any, at: Any, out: Any, first: Any
    ) -> Any:
        """Write 32 elements to `out`: the next of `values` where a bit of `word` is 1, else 0.

        Returns how many values that took. Up to one behind them is read.
        """

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, values_kind, _, out_kind, _ = signature.args
            width = out_kind.dtype.bitwidth
            word, values, at, out, first = args
            next_at = at
            if not vectors:
                for j in range(WORD):
                    place = _place(context, builder, values_kind, values, next_at)
                    bit = _bit(builder, word, j)
                    wide = builder.zext if width > 32 else builder.trunc
                    one = bit if width == 32 else wide(bit, ir.IntType(width))
                    x = builder.and_(builder.load(place, align=1), builder.neg(one))
                    to = _place(context, builder, out_kind, out, builder.add(first, _LONG(j)))
                    builder.store(x, to, align=1)
                    next_at = builder.add(next_at, builder.zext(bit, _LONG))
                return builder.sub(next_at, at)
            for begin, count, mask in _pieces(builder, word, width):
                some = vector(width, count)
                place = _place(context, builder, values_kind, values, next_at)
                kind = ir.FunctionType(some, [place.type, mask.type, some])
                name = f"llvm.masked.expandload.v{count}i{width}"
                function = cgutils.get_or_insert_function(builder.module, kind, name)
                x = builder.call(function, [place, mask, zero(some)])
                at_out = builder.add(first, _LONG(begin))
                builder.store(x, _place(context, builder, out_kind, out, at_out, count), align=1)
                next_at = builder.add(next_at, _ones(builder, mask))
            return builder.sub(next_at, at)

        i = types.int64
        return i(types.uint32, values, i, out, i), build

    return expand_word


compress_word = compressor(available())
expand_word = expander(available())
