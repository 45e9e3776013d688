"""Bit operations that the Numba twins share, on one word or on a group of up to 32 chunks.

A group is a local array of the chunks' own dtype, computed on as uint64: LLVM sees that the upper
bits are dropped, and works on narrow vectors. For that a loop over a group does one thing, has no
branch that depends on data, and its indices are unsigned, so that Numba puts no test for negative
ones into it. Such a loop goes to `count`, never to a constant 32: LLVM would unroll that into
single steps before it looks for vectors.

Numba's cache of a function looks at the function's own file: whoever changes this one while working
on it has to clear ``__pycache__``, or rows.py goes on with the old code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import compiles_for, njit

ONE = np.uint64(1)
TWO = np.uint64(2)
ZERO = np.uint64(0)
WORD = np.uint64(32)
GROUP = 32  # chunks of a group
LOW_WORD = np.uint64(0xFFFFFFFF)
MOST_FLOAT32 = float(np.finfo(np.float32).max)

#: Whether one instruction spreads bits, and fast: of the processors that have it, those before the
#: ones with this part of AVX-512 may take a hundred times as long.
SPREADS = compiles_for("bmi2", "avx512vbmi2")


@intrinsic  # type: ignore[untyped-decorator]
def popcount(typing_context: Any, x: Any) -> Any:
    """Count the set bits of an unsigned integer (Numba has no function of its own for it)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = builder.ctpop(args[0])
        width = signature.args[0].bitwidth
        return builder.zext(count, ir.IntType(64)) if width < 64 else count

    return types.int64(x), build


@intrinsic  # type: ignore[untyped-decorator]
def width_of(typing_context: Any, array: Any) -> Any:
    """Bits of an array's element, as a constant that LLVM sees; ``array.itemsize`` is read."""
    bits = array.dtype.bitwidth

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.int64, bits)

    return types.int64(array), build


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing_context: Any, x: Any) -> Any:
    """Bits of the type of an integer."""
    bits = x.bitwidth

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.int64, bits)

    return types.int64(x), build


@intrinsic  # type: ignore[untyped-decorator]
def spread_bits(typing_context: Any, x: Any, mask: Any) -> Any:
    """Spread the low bits of `x` over the places of a mask, by an instruction of x86 (BMI2)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 2)
        name = "llvm.x86.bmi.pdep.64"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return types.uint64(types.uint64, types.uint64), build


@intrinsic  # type: ignore[untyped-decorator]
def rounded_bits(typing_context: Any, x: Any) -> Any:
    """Return the bits of a float64 rounded to float32, to nearest and ties to even."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.FloatType()), ir.IntType(32))

    return types.uint32(types.float64), build


@njit(nogil=True, cache=True, forceinline=True)
def float32_bits(x):
    """Return the bits of a float64 rounded to the nearest finite float32, ties to even."""
    return rounded_bits(min(max(x, -MOST_FLOAT32), MOST_FLOAT32))


@intrinsic  # type: ignore[untyped-decorator]
def float64_bits(typing_context: Any, x: Any) -> Any:
    """Return the bits of a float64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.uint64(types.float64), build


@intrinsic  # type: ignore[untyped-decorator]
def float64_of_bits(typing_context: Any, x: Any) -> Any:
    """Return the float64 that has such bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.uint64), build


@njit(nogil=True, cache=True)
def lowest_bit(x):
    """Return the place of the lowest set bit of `x`, which is not 0."""
    return popcount((x & (~x + ONE)) - ONE)


@njit(nogil=True, cache=True)
def low_bits(count):
    """Return a word whose `count` low bits are set; 0 to 64."""
    return ~ZERO if count >= 64 else (ONE << np.uint64(count)) - ONE


@njit(nogil=True, cache=True)
def read_bits(words, bit):
    """Return the 64 bits of `words` that start at `bit`; needs three readable words there."""
    i = np.uint64(bit) >> np.uint64(5)
    shift = np.uint64(bit) & np.uint64(31)
    pair = np.uint64(words[i]) | (np.uint64(words[i + ONE]) << WORD)
    # Two shifts, because one by 64 has no meaning.
    return (pair >> shift) | ((np.uint64(words[i + TWO]) << WORD) << (WORD - shift))


@njit(nogil=True, cache=True)
def read_short(words, bit):
    """Return at least 33 bits of `words` that start at `bit`; needs two readable words there."""
    i = np.uint64(bit) >> np.uint64(5)
    pair = np.uint64(words[i]) | (np.uint64(words[i + ONE]) << WORD)
    return pair >> (np.uint64(bit) & np.uint64(31))


@njit(nogil=True, cache=True)
def read_chunk(words, bit, like):
    """Return at least as many bits as a chunk of `like` has of `words`, from `bit` on."""
    # What two words are sure to hold suffices, but for 8-byte chunks.
    return read_bits(words, bit) if width_of(like) == 64 else read_short(words, bit)


@njit(nogil=True, cache=True)
def append_bits(words, bit, carry, value, count):
    """Append `count` bits of `value`, whose other bits are 0, to a stream of words at `bit`.

    `carry` holds the bits of the stream's last, unfinished word; `end_bits` writes it at the end.
    No word is read. Appending nothing at the start of a word writes 0 there.

    Returns the new `bit` and `carry`.
    """
    i = np.uint64(bit) >> np.uint64(5)
    filled = np.uint64(bit) & np.uint64(31)
    if count > 32:
        carry |= (value & LOW_WORD) << filled
        words[i] = carry & LOW_WORD
        i += ONE
        carry >>= WORD
        value >>= WORD
    carry |= value << filled
    words[i] = carry & LOW_WORD  # whether or not it is finished: cheaper than to ask
    bit += count
    finished = (np.uint64(bit) >> np.uint64(5)) - i  # 0 or 1 words
    return bit, carry >> (finished << np.uint64(5))


@njit(nogil=True, cache=True)
def end_bits(words, bit, carry):
    """Write the last, unfinished word of a stream that ends at `bit`; return the word behind it."""
    if bit & 31:
        words[bit >> 5] = carry
    return (bit + 31) >> 5


@njit(nogil=True, cache=True)
def deposit(x, count, table, section, levels, base, uniform):
    """Spread the low bits of each chunk of a group by the steps in ``table[section:]``.

    What stands above the bits to spread does not matter: the steps leave it, or parts of it, at
    places outside the mask.
    """
    for back in range(levels):
        level = levels - 1 - back
        step = np.uint64(section + level)
        if uniform and table[step, ZERO] == 0:
            continue
        # The `&` changes nothing; it lets LLVM work in the chunk's width.
        shift = np.uint64((1 << level) & (width_of(x) - 1))
        for j in range(count):
            v = np.uint64(x[j])
            move = np.uint64(table[step, np.uint64(base + j)])
            x[j] = (v & ~move) | ((v << shift) & move)


@njit(nogil=True, cache=True)
def extract(x, count, table, section, levels, base, uniform):
    """Gather bits into the low end, undoing `deposit`; no chunk has a bit outside the mask."""
    for level in range(levels):
        step = np.uint64(section + level)
        if uniform and table[step, ZERO] == 0:
            continue
        shift = np.uint64((1 << level) & (width_of(x) - 1))
        for j in range(count):
            v = np.uint64(x[j])
            move = np.uint64(table[step, np.uint64(base + j)])
            x[j] = (v & ~move) | ((v & move) >> shift)


@intrinsic  # type: ignore[untyped-decorator]
def leading_zeros(typing_context: Any, x: Any) -> Any:
    """Count the bits above the highest set bit of a uint64; 64 of 0."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), build
