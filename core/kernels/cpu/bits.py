"""Bit operations that the Numba twins share: population count, bit moves, reading a bit stream."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def popcount(typing_context: Any, x: Any) -> Any:
    """Count the set bits of an unsigned integer (Numba has no function of its own for it)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = builder.ctpop(args[0])
        width = signature.args[0].bitwidth
        return builder.zext(count, ir.IntType(64)) if width < 64 else count

    return types.int64(x), build


@njit(nogil=True, cache=True, inline="always")
def read_bits(words, bit):
    """Return the 64 bits of `words` that start at `bit`; needs three readable words there."""
    i = bit >> 5
    shift = np.uint64(bit & 31)
    low = np.uint64(words[i]) | (np.uint64(words[i + 1]) << np.uint64(32))
    if shift == 0:
        return low
    return (low >> shift) | (np.uint64(words[i + 2]) << (np.uint64(64) - shift))


@njit(nogil=True, cache=True, inline="always")
def read_short(words, bit):
    """Return at least 33 bits of `words` that start at `bit`; needs two readable words there."""
    i = bit >> 5
    pair = np.uint64(words[i]) | (np.uint64(words[i + 1]) << np.uint64(32))
    return pair >> np.uint64(bit & 31)


@njit(nogil=True, cache=True, inline="always")
def write_bits(words, bit, value, count):
    """Or the `count` low bits of `value` (its other bits are 0) into `words` at `bit`."""
    if count == 0:
        return
    i = bit >> 5
    shift = np.uint64(bit & 31)
    low = value << shift
    words[i] |= np.uint32(low & np.uint64(0xFFFFFFFF))
    end = np.int64(shift) + count
    if end > 32:
        words[i + 1] |= np.uint32(low >> np.uint64(32))
        if end > 64:
            words[i + 2] |= np.uint32(value >> (np.uint64(64) - shift))


@njit(nogil=True, cache=True, inline="always")
def deposit(x, table, first, levels, position):
    """Spread the low bits of `x` by the steps in `table[first : first + levels, position]`."""
    for back in range(levels):
        level = levels - 1 - back
        move = np.uint64(table[first + level, position])
        x = (x & ~move) | ((x << np.uint64(1 << level)) & move)
    return x


@njit(nogil=True, cache=True, inline="always")
def extract(x, table, first, levels, position):
    """Gather bits into the low end, undoing `deposit`; `x` has no bit outside the mask."""
    for level in range(levels):
        moved = x & np.uint64(table[first + level, position])
        x = (x ^ moved) | (moved >> np.uint64(1 << level))
    return x
