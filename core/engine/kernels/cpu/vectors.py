"""Numba loops of rows of which equal ones are kept once; see `vector_format`.

``x`` are the bits of values, unsigned; ``codes`` int16, ``rows`` unsigned units ``[rows, units]``.
"""

from __future__ import annotations

import numpy as np

from ..vector_format import MOST_CODE, NO_CODE
from .floats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    brain_bits,
    float_of,
    float_of_brain,
    float_of_half,
    half_bits,
)
from .jit import njit

HASH = np.uint64(0x9E3779B97F4A7C15)
HIGH = np.uint64(32)


@njit(nogil=True, cache=True)
def value_of(bits, kind):
    """Return the float32 of the bits of a value."""
    if kind == BFLOAT16:
        return float_of_brain(bits)
    if kind == FLOAT16:
        return float_of_half(bits)
    return float_of(bits)


@njit(nogil=True, cache=True)
def rounded(value, kind):
    """Return a float32 rounded to the dtype, as float32."""
    if kind == BFLOAT16:
        return float_of_brain(brain_bits(value))
    if kind == FLOAT16:
        return float_of_half(half_bits(value))
    return value


@njit(nogil=True, cache=True)
def values_of_codes(least, step, kind, values):
    """Write the bits of the values of codes from the least one on; ``step`` is float32."""
    for i in range(values.shape[0]):
        value = np.float32(least + i) * step
        if kind == BFLOAT16:
            values[i] = brain_bits(value)
        elif kind == FLOAT16:
            values[i] = half_bits(value)
        else:
            values[i] = np.float32(value).view(np.uint32)


@njit(nogil=True, cache=True)
def finite_keys(x, exponent, highest, found, begin, end):
    """Write the least and the largest key of the finite values of begin..end to ``found``.

    ``x`` are the bits of values as signed integers; of the same type are ``exponent``, which masks
    the exponent, ``highest``, the largest integer, and the keys, which `key_of` returns: integers
    are compared several at once. Without finite values the least key is the largest integer, and
    the largest the least one.
    """
    kind = x.dtype.type
    sign_at = kind(8 * x.itemsize - 1)
    lowest = kind(-highest - 1)
    least, largest = highest, lowest
    values = x[begin:end]
    for i in range(values.shape[0]):
        bits = values[i]
        key = kind(bits ^ (kind(bits >> sign_at) & highest))
        finite = kind(bits & highest) < exponent
        least = min(key if finite else highest, least)
        largest = max(key if finite else lowest, largest)
    found[0], found[1] = least, largest


def key_of(bits: int, highest: int) -> int:
    """Return an integer that rises with a float, of its bits as a signed integer; and back."""
    return bits ^ highest if bits < 0 else bits


@njit(nogil=True, cache=True)
def quantise(x, kind, step, inverse, bound, codes, found, begin, end):
    """Write the codes of begin..end, NO_CODE where none is within the bound.

    ``step`` and ``inverse`` are float32, ``bound`` is float64. To ``found`` go the least and the
    largest code, and how many values have none.
    """
    if kind == FLOAT32:
        quantise_wide(x[begin:end].view(np.float32), step, inverse, bound, codes[begin:end])
    else:
        most = np.float32(MOST_CODE)
        for i in range(begin, end):
            value = value_of(x[i], kind)
            scaled = np.rint(value * inverse)
            code = np.int64(NO_CODE)
            if abs(scaled) <= most:  # not of NaN
                decoded = rounded(scaled * step, kind)
                if abs(np.float64(value) - np.float64(decoded)) <= bound:
                    code = np.int64(scaled)
            codes[i] = code
    range_of_codes(codes[begin:end], found)


@njit(nogil=True, cache=True)
def quantise_wide(values, step, inverse, bound, codes):
    """Write the codes of float32 without a branch: several at once."""
    most, none = np.float32(MOST_CODE), np.float32(NO_CODE)
    for i in range(values.shape[0]):
        value = values[i]
        scaled = np.rint(value * inverse)
        error = abs(np.float64(value) - np.float64(scaled * step))
        codes[i] = np.int32(scaled if (abs(scaled) <= most) & (error <= bound) else none)


@njit(nogil=True, cache=True)
def range_of_codes(codes, found):
    """Write the least and the largest code to ``found``, and how many values have none."""
    lowest, highest = np.int16(MOST_CODE), np.int16(NO_CODE)
    for i in range(codes.shape[0]):  # several at once
        lowest = min(codes[i], lowest)
        highest = max(codes[i], highest)
    if lowest != np.int16(NO_CODE):
        found[0], found[1], found[2] = lowest, highest, 0
        return
    least, largest, outliers = np.int16(MOST_CODE), np.int16(-MOST_CODE), np.int64(0)
    for i in range(codes.shape[0]):
        code = codes[i]
        none = code == np.int16(NO_CODE)
        outliers += np.int64(none)
        low = np.int16(MOST_CODE) if none else code
        high = np.int16(-MOST_CODE) if none else code
        least = low if low < least else least
        largest = high if high > largest else largest
    found[0] = least
    found[1] = largest
    found[2] = outliers


@njit(nogil=True, cache=True)
def hash_rows(rows, hashes, begin, end):
    """Write a hash of each of the rows begin..end."""
    # A unit's step waits for the one before: four rows at once hide that.
    whole = begin + ((end - begin) & ~3)
    for i in range(begin, whole, 4):
        a, b, c, d = HASH, HASH, HASH, HASH
        for j in range(rows.shape[1]):
            a = (a ^ np.uint64(rows[i, j])) * HASH
            b = (b ^ np.uint64(rows[i + 1, j])) * HASH
            c = (c ^ np.uint64(rows[i + 2, j])) * HASH
            d = (d ^ np.uint64(rows[i + 3, j])) * HASH
            a ^= a >> HIGH
            b ^= b >> HIGH
            c ^= c >> HIGH
            d ^= d >> HIGH
        hashes[i], hashes[i + 1], hashes[i + 2], hashes[i + 3] = a, b, c, d
    for i in range(whole, end):
        state = HASH
        for j in range(rows.shape[1]):
            state = (state ^ np.uint64(rows[i, j])) * HASH
            state ^= state >> HIGH
        hashes[i] = state


@njit(nogil=True, cache=True)
def find_references(rows, hashes, marks, window, slots, places, literals):
    """Find for each row an equal one before it; return how many rows have none.

    Parameters: ``marks`` has a 1 for rows that take no part; ``window`` rows that a reference
    reaches back, 0 for all; ``slots`` int32, a power of two of them, all -1. ``places`` gets of
    each row the number of the distinct row that it equals (of a window, the distance back, 0 for a
    distinct row), ``literals`` the distinct rows.
    """
    mask = np.uint64(slots.shape[0] - 1)
    distinct = 0
    numbers = np.empty(rows.shape[0] if window == 0 else 0, np.int32)
    for i in range(rows.shape[0]):
        before = -1
        if not marks[i]:
            at = (hashes[i] ^ (hashes[i] >> HIGH)) & mask
            while slots[at] >= 0:
                other = slots[at]
                if hashes[other] == hashes[i]:
                    j = 0
                    while j < rows.shape[1] and rows[other, j] == rows[i, j]:
                        j += 1
                    if j == rows.shape[1]:
                        before = other
                        break
                at = (at + np.uint64(1)) & mask
            if before < 0 or window > 0:
                slots[at] = i
        if window > 0:
            if before >= 0 and i - before > window:
                before = -1
            places[i] = i - before if before >= 0 else 0
        elif before >= 0:
            places[i] = numbers[before]
        else:
            places[i] = distinct
            numbers[i] = distinct
        if before < 0:
            literals[distinct] = i
            distinct += 1
    return distinct


@njit(nogil=True, cache=True)
def follow_references(bitmap, fields, windowed, distinct, places):
    """Write of each row the number of its distinct row; return whether all are sound."""
    literal = 0
    reference = 0
    for i in range(places.shape[0]):
        if (bitmap[i >> 5] >> np.uint32(i & 31)) & np.uint32(1):
            if reference >= fields.shape[0]:
                return False
            field = np.int64(fields[reference])
            reference += 1
            if windowed:
                if field >= i:
                    return False
                places[i] = places[i - field - 1]
            else:
                if field >= distinct:
                    return False
                places[i] = field
        else:
            if literal >= distinct:
                return False
            places[i] = literal
            literal += 1
    return literal == distinct and reference == fields.shape[0]


@njit(nogil=True, cache=True)
def gather_rows(rows, places, out, begin, end):
    """Write the rows begin..end of ``out``, whose places were checked."""
    for i in range(begin, end):
        row = places[i]
        for j in range(rows.shape[1]):
            out[i, j] = rows[row, j]
