"""Numba twins of zfp.cu: the readable definition of the stream; see `zfp_format`.

``x`` and ``out`` are values as unsigned integers, ``words`` the stream as uint64, ``codes`` and
``runs`` what `zfp_format.plane_codes` and `plane_runs` return. A row is ROW_UNITS values.
The kind of the values is `fraction_bits`, `exponent_bits`, `int_bits` of an integer of a block, and
`block_bits` are those of a block. What is decoded is computed as float64 where no result is
subnormal, in which it is exact but for the last rounding; torch may have subnormal ones flushed.
"""

from __future__ import annotations

import numpy as np

from ..kept_format import ROW_UNITS
from ..zfp_format import BLOCK_VALUES, LEAST_EXPONENT, RUN_BITS
from .bits import float32_bits, float64_bits, float64_of_bits, leading_zeros, low_bits, width_of
from .jit import njit

ROW_BLOCKS = ROW_UNITS // BLOCK_VALUES
ONE = np.uint64(1)
ZERO = np.uint64(0)
FOUR = np.uint64(4)
WORD = np.uint64(64)
NEGABINARY = np.uint64(0xAAAAAAAAAAAAAAAA)
RUN = np.uint64(RUN_BITS)
NEXT = np.uint64((1 << RUN_BITS) - 1)
ENDS = np.uint64(5 << RUN_BITS)  # where the runs at the end of a block begin
FIFTEEN = np.uint64(15)
BYTE = np.uint64(255)
NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
BYTES = np.uint64(0x00FF00FF00FF00FF)
PAIRS = np.uint64(0x0000FFFF0000FFFF)
MAGNITUDE = np.uint64((1 << 63) - 1)  # of a float64


@njit(nogil=True, cache=True)
def exponent_and_fraction(bits, fraction_bits, exponent_bits):
    """Return the exponent field, at least 1, and the fraction with its leading bit.

    The value is the fraction times two to the power of the field less bias and `fraction_bits`.
    """
    field = np.int64(bits >> np.uint64(fraction_bits)) & ((1 << exponent_bits) - 1)
    fraction = bits & low_bits(fraction_bits)
    if field:
        return field, fraction | (ONE << np.uint64(fraction_bits))
    return np.int64(1), fraction


@njit(nogil=True, cache=True)
def fold(y, int_bits):
    """Return an integer of a block as such of `int_bits` with a sign: overflow comes around."""
    unused = 64 - int_bits
    return (y << unused) >> unused


@njit(nogil=True, cache=True)
def encode_zfp(
    x, fraction_bits, exponent_bits, int_bits, block_bits, codes, words, counts, begin, end
):
    """Write the stream of the rows begin..end, and how many of their values are not finite.

    Those are 0 in the stream.
    """
    n = len(x)
    infinite = ((ONE << np.uint64(exponent_bits)) - ONE) << np.uint64(fraction_bits)
    magnitude = low_bits(fraction_bits + exponent_bits)
    sign_bit = np.uint64(fraction_bits + exponent_bits)
    scale = ((1 << (exponent_bits - 1)) - 1) + fraction_bits
    bias, field_bits = (127, 8) if int_bits == 32 else (1023, 11)
    negabinary = NEGABINARY & low_bits(int_bits)
    for row in range(begin, end):
        bad = 0
        w = row * ROW_BLOCKS * block_bits // 64
        carry, filled = ZERO, np.uint64(0)
        last = min(n, (row + 1) * ROW_UNITS)
        for i in range(row * ROW_UNITS, last, BLOCK_VALUES):
            v0 = np.uint64(x[i])
            if i + BLOCK_VALUES <= n:
                v1, v2, v3 = np.uint64(x[i + 1]), np.uint64(x[i + 2]), np.uint64(x[i + 3])
                bad += (v0 & infinite) == infinite
                bad += (v1 & infinite) == infinite
                bad += (v2 & infinite) == infinite
                bad += (v3 & infinite) == infinite
            else:  # filled up as zfp does
                v1 = np.uint64(x[i + 1]) if i + 1 < n else v0
                v2 = np.uint64(x[i + 2]) if i + 2 < n else v1
                v3 = v0
                for j in range(i, n):
                    bad += (np.uint64(x[j]) & infinite) == infinite
            v0 = ZERO if (v0 & infinite) == infinite else v0
            v1 = ZERO if (v1 & infinite) == infinite else v1
            v2 = ZERO if (v2 & infinite) == infinite else v2
            v3 = ZERO if (v3 & infinite) == infinite else v3
            most = max(max(v0 & magnitude, v1 & magnitude), max(v2 & magnitude, v3 & magnitude))
            left = np.int64(block_bits)
            if most == ZERO:
                a = b = c = d = ZERO
            else:
                field, fraction = exponent_and_fraction(most, fraction_bits, exponent_bits)
                exponent = max(64 - leading_zeros(fraction) + field - scale, 1 - bias)
                head = np.uint64(2 * (exponent + bias) + 1)
                carry |= head << filled
                filled += np.uint64(field_bits + 1)
                if filled >= WORD:
                    words[w] = carry
                    w += 1
                    filled -= WORD
                    carry = (head >> ONE) >> (np.uint64(field_bits) - filled)
                left -= field_bits + 1
                shift = int_bits - 2 - exponent - scale
                p0 = aligned_value(v0, magnitude, sign_bit, fraction_bits, exponent_bits, shift)
                p1 = aligned_value(v1, magnitude, sign_bit, fraction_bits, exponent_bits, shift)
                p2 = aligned_value(v2, magnitude, sign_bit, fraction_bits, exponent_bits, shift)
                p3 = aligned_value(v3, magnitude, sign_bit, fraction_bits, exponent_bits, shift)
                p0 = (p0 + p3) >> 1
                p3 -= p0
                p2 = (p2 + p1) >> 1
                p1 -= p2
                p0 = (p0 + p2) >> 1
                p2 -= p0
                p3 = (p3 + p1) >> 1
                p1 -= p3
                p3 += p1 >> 1
                p1 -= p3 >> 1
                a = (np.uint64(p0) + negabinary) ^ negabinary
                b = (np.uint64(p1) + negabinary) ^ negabinary
                c = (np.uint64(p2) + negabinary) ^ negabinary
                d = (np.uint64(p3) + negabinary) ^ negabinary
                used = low_bits(int_bits)
                a, b, c, d = a & used, b & used, c & used, d & used
                least = max(0, int_bits - max(0, exponent - LEAST_EXPONENT + 4))
                top = 64 - leading_zeros(a | b | c | d)
                top = max(top, least)
                # Planes above the highest bit take a bit 0 each.
                skipped = min(int_bits - top, left)
                left -= skipped
                filled += np.uint64(skipped)
                if filled >= WORD:
                    words[w] = carry
                    w += 1
                    filled -= WORD
                    carry = ZERO
                known = np.uint64(0)
                k = np.uint64(top)
                while left > 0 and k > np.uint64(least):
                    k -= ONE
                    plane = (a >> k) & ONE
                    plane |= ((b >> k) & ONE) << ONE
                    plane |= ((c >> k) & ONE) << np.uint64(2)
                    plane |= ((d >> k) & ONE) << np.uint64(3)
                    if known == FOUR:  # the plane is its code: no look-up to wait for
                        code, count = plane, FOUR
                    else:
                        entry = np.uint64(codes[known << FOUR | plane])
                        code = entry & np.uint64(255)
                        count = (entry >> np.uint64(8)) & np.uint64(15)
                        known = entry >> np.uint64(12)
                    if np.int64(count) > left:
                        count = np.uint64(left)
                        code &= (ONE << count) - ONE
                    left -= np.int64(count)
                    carry |= code << filled
                    filled += count
                    if filled >= WORD:
                        words[w] = carry
                        w += 1
                        filled -= WORD
                        carry = code >> (count - filled)
            filled += np.uint64(left)
            while filled >= WORD:
                words[w] = carry
                w += 1
                filled -= WORD
                carry = ZERO
        if filled:
            words[w] = carry
        counts[row] = bad


@njit(nogil=True, cache=True)
def aligned_value(v, magnitude, sign_bit, fraction_bits, exponent_bits, shift):
    """Return a value as an integer in units of its block's exponent, cut off towards 0."""
    field, fraction = exponent_and_fraction(v & magnitude, fraction_bits, exponent_bits)
    by = field + shift
    if by >= 0:
        y = np.int64(fraction << np.uint64(by))
    else:
        y = np.int64(fraction >> np.uint64(-by)) if by > -64 else np.int64(0)
    return -y if (v >> sign_bit) & ONE else y


@njit(nogil=True, cache=True)
def value_of(y, unit, fraction_bits, exponent_bits):
    """Return the bits of `y` times two to the power of `unit`, rounded to nearest, ties to even.

    What is too large becomes the largest finite value.
    """
    if y == 0:
        return ZERO
    size = np.uint64(-y) if y < 0 else np.uint64(y)
    bias = (1 << (exponent_bits - 1)) - 1
    count = 64 - leading_zeros(size)
    above = max(count - 1 + unit + bias - 1, 0)  # of the least normal exponent
    shift = above - bias + 1 - fraction_bits - unit
    if shift <= 0:
        fraction = size << np.uint64(-shift)
    elif shift > count or shift >= 64:
        fraction = ZERO
    else:
        by = np.uint64(shift)
        rest = size & ((ONE << by) - ONE)
        half = ONE << (by - ONE)
        fraction = size >> by
        fraction += np.uint64(rest > half or (rest == half and (fraction & ONE) == ONE))
    bits = (np.uint64(above) << np.uint64(fraction_bits)) + fraction
    infinite = ((ONE << np.uint64(exponent_bits)) - ONE) << np.uint64(fraction_bits)
    bits = min(bits, infinite - ONE)
    return bits | (np.uint64(y < 0) << np.uint64(fraction_bits + exponent_bits))


@njit(nogil=True, cache=True, forceinline=True)
def scaled(y, scale, unit, fraction_bits, exponent_bits):
    """Return `value_of`, given two to the power of `unit` as float64: 0.0 where that is not normal.

    The product is exact, or rounded once where `y` has more bits than a float64, and never
    subnormal; a normal value's bits are the upper ones of it.
    """
    number = float64_bits(np.float64(y) * scale)
    size = number & MAGNITUDE
    rebias = np.uint64(1024 - (1 << (exponent_bits - 1)))
    dropped = np.uint64(52 - fraction_bits)
    least_normal = (rebias + ONE) << np.uint64(52)
    if (size < least_normal) & (y != 0):  # one branch, seldom taken: zeros are frequent
        return value_of(y, unit, fraction_bits, exponent_bits)
    if dropped:
        size += (ONE << (dropped - ONE)) - ONE + ((size >> dropped) & ONE)
    infinite = ((ONE << np.uint64(exponent_bits)) - ONE) << np.uint64(fraction_bits)
    bits = min((size >> dropped) - (rebias << np.uint64(fraction_bits)), infinite - ONE)
    bits = bits if y else ZERO
    return bits | (number >> np.uint64(63)) << np.uint64(fraction_bits + exponent_bits)


@njit(nogil=True, cache=True, forceinline=True)
def every_fourth(x):
    """Return bits 0, 4, 8 and so on of a word, next to each other."""
    x &= np.uint64(0x1111111111111111)
    x = (x | x >> np.uint64(3)) & np.uint64(0x0303030303030303)
    x = (x | x >> np.uint64(6)) & np.uint64(0x000F000F000F000F)
    x = (x | x >> np.uint64(12)) & np.uint64(0x000000FF000000FF)
    return (x | x >> np.uint64(24)) & np.uint64(0xFFFF)


@njit(nogil=True, cache=True, forceinline=True)
def nibbles_backwards(x):
    """Return a word whose first four bits are the last ones of `x`, and so on."""
    x = (x >> np.uint64(32)) | (x << np.uint64(32))
    x = ((x >> np.uint64(16)) & PAIRS) | ((x & PAIRS) << np.uint64(16))
    x = ((x >> np.uint64(8)) & BYTES) | ((x & BYTES) << np.uint64(8))
    return ((x >> FOUR) & NIBBLES) | ((x & NIBBLES) << FOUR)


@njit(nogil=True, cache=True, forceinline=True)
def decode_planes(low, high, left, planes, runs):
    """Return the integers of a block in base -2, given the bits of their planes.

    These are `left` of the 128 bits of `low` and `high`. The planes are `planes` with those that
    are cut off; the lowest bit of an integer is of the last one.
    """
    a = b = c = d = ZERO
    known = ZERO
    while known != FOUR and left > 0 and planes > 0:
        at = known << RUN
        if left >= RUN_BITS:
            at |= low & NEXT
        else:
            stop = ONE << np.uint64(left)
            at += ENDS + (stop | (low & (stop - ONE)))
        entry = runs[at]
        count, by = (entry >> np.uint64(32)) & FIFTEEN, (entry >> np.uint64(36)) & FIFTEEN
        known = entry >> np.uint64(40)
        over = np.uint64(max(np.int64(count) - planes, 0))
        taken = count - over
        a = (a << taken) | (entry & BYTE) >> over
        b = (b << taken) | ((entry >> np.uint64(8)) & BYTE) >> over
        c = (c << taken) | ((entry >> np.uint64(16)) & BYTE) >> over
        d = (d << taken) | ((entry >> np.uint64(24)) & BYTE) >> over
        planes -= np.int64(taken)
        left -= np.int64(by)
        low = (low >> by) | (high << (WORD - by))
        high >>= by
    # Planes that are their codes: 16 of a word at a time.
    count = min(planes, (left + 3) >> 2)
    planes -= count
    while count > 0:
        if left < 64:
            low &= (ONE << np.uint64(left)) - ONE
        taken = min(count, 16)
        by, over = np.uint64(taken), np.uint64(16 - taken)
        word = nibbles_backwards(low)
        a = (a << by) | every_fourth(word) >> over
        b = (b << by) | every_fourth(word >> ONE) >> over
        c = (c << by) | every_fourth(word >> np.uint64(2)) >> over
        d = (d << by) | every_fourth(word >> np.uint64(3)) >> over
        low = high  # of which a block of more than 16 such planes has the rest
        left -= 64
        count -= taken
    by = np.uint64(planes)
    return a << by, b << by, c << by, d << by


@njit(nogil=True, cache=True)
def decode_zfp(words, fraction_bits, exponent_bits, block_bits, runs, out, begin, end):
    """Write the values of the rows begin..end, whatever the stream holds."""
    n = len(out)
    int_bits = 64 if width_of(out) == 64 else 32  # that the compiler knows
    bias, field_bits = (127, 8) if int_bits == 32 else (1023, 11)
    negabinary = NEGABINARY & low_bits(int_bits)
    for row in range(begin, end):
        bit = np.uint64(row * ROW_BLOCKS * block_bits)
        last = min(n, (row + 1) * ROW_UNITS)
        for i in range(row * ROW_UNITS, last, BLOCK_VALUES):
            w, by = bit >> np.uint64(6), bit & np.uint64(63)
            low, high = words[w] >> by, ZERO
            # A block of so many bits may end in this word, the next one or the one behind it.
            if w + ONE < len(words):
                low |= (words[w + ONE] << ONE) << (np.uint64(63) - by)
                high = words[w + ONE] >> by
                if by and w + np.uint64(2) < len(words):
                    high |= words[w + np.uint64(2)] << (WORD - by)
            bit += np.uint64(block_bits)
            if low & ONE == ZERO:
                for j in range(i, min(i + BLOCK_VALUES, last)):
                    out[j] = 0
                continue
            exponent = np.int64((low >> ONE) & low_bits(field_bits)) - bias
            by = np.uint64(field_bits + 1)
            low = (low >> by) | (high << (WORD - by))
            high >>= by
            least = max(0, int_bits - max(0, exponent - LEAST_EXPONENT + 4))
            left, planes = block_bits - field_bits - 1, int_bits - least
            a, b, c, d = decode_planes(low, high, left, planes, runs)
            by = np.uint64(least)
            p0 = fold(np.int64((a << by ^ negabinary) - negabinary), int_bits)
            p1 = fold(np.int64((b << by ^ negabinary) - negabinary), int_bits)
            p2 = fold(np.int64((c << by ^ negabinary) - negabinary), int_bits)
            p3 = fold(np.int64((d << by ^ negabinary) - negabinary), int_bits)
            p1 = fold(p1 + (p3 >> 1), int_bits)
            p3 = fold(p3 - (p1 >> 1), int_bits)
            p1 += p3
            p3 = (p3 << 1) - p1
            p2 += p0
            p0 = (p0 << 1) - p2
            p1 += p2
            p2 = (p2 << 1) - p1
            p3 += p0
            p0 = (p0 << 1) - p3
            p0, p1 = fold(p0, int_bits), fold(p1, int_bits)
            p2, p3 = fold(p2, int_bits), fold(p3, int_bits)
            unit = exponent - (int_bits - 2)
            scale = float64_of_bits(np.uint64(max(unit + 1023, 0)) << np.uint64(52))
            if width_of(out) == 32 and unit >= 1 - bias and i + 3 < last:
                # No value is subnormal: by arithmetic of floats.
                out[i] = float32_bits(np.float64(p0) * scale)
                out[i + 1] = float32_bits(np.float64(p1) * scale)
                out[i + 2] = float32_bits(np.float64(p2) * scale)
                out[i + 3] = float32_bits(np.float64(p3) * scale)
                continue
            out[i] = scaled(p0, scale, unit, fraction_bits, exponent_bits)
            if i + 1 < last:
                out[i + 1] = scaled(p1, scale, unit, fraction_bits, exponent_bits)
            if i + 2 < last:
                out[i + 2] = scaled(p2, scale, unit, fraction_bits, exponent_bits)
            if i + 3 < last:
                out[i + 3] = scaled(p3, scale, unit, fraction_bits, exponent_bits)


@njit(nogil=True, cache=True)
def pack_zfp(x, fraction_bits, exponent_bits, starts, values, columns, begin, end):
    """Write the values that are not finite of the rows begin..end, and their columns."""
    infinite = ((ONE << np.uint64(exponent_bits)) - ONE) << np.uint64(fraction_bits)
    for row in range(begin, end):
        to = starts[row]
        if to == starts[row + 1]:
            continue
        first = row * ROW_UNITS
        for i in range(first, min(len(x), first + ROW_UNITS)):
            # No more than were counted: another thread may have changed the row since.
            if (np.uint64(x[i]) & infinite) == infinite and to < starts[row + 1]:
                values[to] = x[i]
                columns[to] = i - first
                to += 1
