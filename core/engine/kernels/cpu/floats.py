"""Floats of 16 bits to float32 and back by integer arithmetic, to nearest, ties to even.

Numba's cache of a function looks at the function's own file: whoever changes this one while working
on it has to clear ``__pycache__``, or tile_streams.py goes on with the old code.
"""

from __future__ import annotations

import numpy as np

from .jit import njit

#: Kinds of dtypes.
BFLOAT16, FLOAT16, FLOAT32 = range(3)


@njit(nogil=True, cache=True)
def float_of(bits):
    """Return the float32 of these 32 bits."""
    return np.uint32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def half_bits(value):
    """Return the bits of a float32 rounded to float16, to nearest, ties to even."""
    bits = np.int64(np.float32(value).view(np.uint32))
    sign = (bits >> 16) & 0x8000
    bits &= 0x7FFFFFFF
    if bits >= 0x47800000:  # 65536 and more, infinities and NaN
        return sign | (0x7E00 if bits > 0x7F800000 else 0x7C00)
    if bits >= 0x38800000:  # normal; a carry out of the mantissa raises the exponent
        return sign | ((bits - 0x38000000 + 0xFFF + ((bits >> 13) & 1)) >> 13)
    if bits < 0x33000000:  # less than half of the least subnormal
        return sign
    shift = 126 - (bits >> 23)
    mantissa = (bits & 0x7FFFFF) | 0x800000
    kept = mantissa >> shift
    rest = mantissa & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    if rest > half or (rest == half and kept & 1):
        kept += 1
    return sign | kept


@njit(nogil=True, cache=True)
def float_of_half(bits):
    """Return the float32 of the bits of a float16."""
    bits = np.int64(bits)
    sign = (bits & 0x8000) << 16
    low = bits & 0x7FFF
    if low >= 0x7C00:
        return float_of(sign | 0x7F800000 | ((low & 0x3FF) << 13))
    if low >= 0x400:
        return float_of(sign | ((low << 13) + 0x38000000))
    value = np.float32(low) * np.float32(2.0**-24)
    return -value if sign else value


@njit(nogil=True, cache=True)
def brain_bits(value):
    """Return the bits of a float32 that is no NaN rounded to bfloat16, ties to even."""
    bits = np.int64(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@njit(nogil=True, cache=True)
def float_of_brain(bits):
    """Return the float32 of the bits of a bfloat16."""
    return float_of(np.int64(bits) << 16)


@njit(nogil=True, cache=True)
def load_values(row, kind, x):
    """Copy a tile to float32 `x`."""
    if kind == BFLOAT16:
        for i in range(row.shape[0]):
            x[i] = float_of_brain(row[i])
    elif kind == FLOAT16:
        for i in range(row.shape[0]):
            x[i] = float_of_half(row[i])
    else:
        for i in range(row.shape[0]):
            x[i] = float_of(row[i])


@njit(nogil=True, cache=True)
def round_values(values, kind, bits):
    """Write the bits of float32 values rounded to the delivered dtype, and the rounded values."""
    if kind == BFLOAT16:
        for p in range(values.shape[0]):
            bits[p] = brain_bits(values[p])
            values[p] = float_of_brain(bits[p])
    elif kind == FLOAT16:
        for p in range(values.shape[0]):
            bits[p] = half_bits(values[p])
            values[p] = float_of_half(bits[p])
    else:
        for p in range(values.shape[0]):
            bits[p] = np.float32(values[p]).view(np.uint32)
