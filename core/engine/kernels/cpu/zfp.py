"""Numba twins of zfp.cu: the readable definition of the stream; see `zfp_format`.

``x`` and ``out`` are values as unsigned integers, ``words`` the stream as uint64, ``codes`` and
``lookup`` what `zfp_format.plane_codes` and `plane_lookup` return. A row is ROW_UNITS values.
The kind of the values is `fraction_bits`, `exponent_bits`, `int_bits` of an integer of a block, and
`block_bits` are those of a block.
"""

from __future__ import annotations

import numpy as np

from ..kept_format import ROW_UNITS
from ..zfp_format import BLOCK_VALUES, LEAST_EXPONENT, PLANE_BITS
from .bits import leading_zeros, low_bits
from .jit import njit

ROW_BLOCKS = ROW_UNITS // BLOCK_VALUES
ONE = np.uint64(1)
ZERO = np.uint64(0)
FOUR = np.uint64(4)
WORD = np.uint64(64)
NEGABINARY = np.uint64(0xAAAAAAAAAAAAAAAA)
NEXT = np.uint64((1 << PLANE_BITS) - 1)


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


@njit(nogil=True, cache=True)
def decode_zfp(words, fraction_bits, exponent_bits, int_bits, block_bits, lookup, out, begin, end):
    """Write the values of the rows begin..end, whatever the stream holds."""
    n = len(out)
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
            a = b = c = d = ZERO
            exponent = np.int64(0)
            if low & ONE:
                exponent = np.int64((low >> ONE) & low_bits(field_bits)) - bias
                by = np.uint64(field_bits + 1)
                low = (low >> by) | (high << (WORD - by))
                high >>= by
                left = block_bits - field_bits - 1
                least = max(0, int_bits - max(0, exponent - LEAST_EXPONENT + 4))
                k = np.int64(int_bits)
                known = ZERO
                while left > 0 and k > least:
                    if known == ZERO and low & ONE == ZERO:  # planes of zeros
                        ahead = 63 - leading_zeros(low & (~low + ONE)) if low else 63
                        ahead = min(ahead, left, k - least)
                        k -= ahead
                        left -= ahead
                        by = np.uint64(ahead)
                        low = (low >> by) | (high << (WORD - by))
                        high >>= by
                        continue
                    k -= 1
                    if left >= PLANE_BITS:
                        entry = np.uint64(lookup[known << np.uint64(PLANE_BITS) | (low & NEXT)])
                        plane = entry & np.uint64(15)
                        by = (entry >> np.uint64(8)) & np.uint64(15)
                        known = entry >> np.uint64(12)
                        left -= np.int64(by)
                        low = (low >> by) | (high << (WORD - by))
                        high >>= by
                    else:
                        plane, known, low, left = last_plane(known, low, left)
                    at = np.uint64(k)
                    a |= (plane & ONE) << at
                    b |= ((plane >> ONE) & ONE) << at
                    c |= ((plane >> np.uint64(2)) & ONE) << at
                    d |= (plane >> np.uint64(3)) << at
                    # Planes that are their codes: none waits for the look-up of the one before.
                    while known == FOUR and left >= BLOCK_VALUES and k > least:
                        k -= 1
                        left -= BLOCK_VALUES
                        at = np.uint64(k)
                        a |= (low & ONE) << at
                        b |= ((low >> ONE) & ONE) << at
                        c |= ((low >> np.uint64(2)) & ONE) << at
                        d |= ((low >> np.uint64(3)) & ONE) << at
                        low = (low >> FOUR) | (high << (WORD - FOUR))
                        high >>= FOUR
            p0 = fold(np.int64((a ^ negabinary) - negabinary), int_bits)
            p1 = fold(np.int64((b ^ negabinary) - negabinary), int_bits)
            p2 = fold(np.int64((c ^ negabinary) - negabinary), int_bits)
            p3 = fold(np.int64((d ^ negabinary) - negabinary), int_bits)
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
            unit = exponent - (int_bits - 2)
            out[i] = value_of(fold(p0, int_bits), unit, fraction_bits, exponent_bits)
            if i + 1 < last:
                out[i + 1] = value_of(fold(p1, int_bits), unit, fraction_bits, exponent_bits)
            if i + 2 < last:
                out[i + 2] = value_of(fold(p2, int_bits), unit, fraction_bits, exponent_bits)
            if i + 3 < last:
                out[i + 3] = value_of(fold(p3, int_bits), unit, fraction_bits, exponent_bits)


@njit(nogil=True, cache=True)
def last_plane(known, low, left):
    """Decode a plane when `left` bits may not hold its code; it ends with them.

    Where they end among the bits up to a further 1, that 1 is taken to come next.
    """
    count = min(np.int64(known), left)
    plane = low & ((ONE << np.uint64(count)) - ONE)
    low >>= np.uint64(count)
    left -= count
    while left > 0 and known < FOUR:
        left -= 1
        more = low & ONE
        low >>= ONE
        if not more:
            break
        while left > 0 and known < np.uint64(3):
            left -= 1
            found = low & ONE
            low >>= ONE
            if found:
                break
            known += ONE
        plane |= ONE << known
        known += ONE
    return plane, known, low, left


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
            if (np.uint64(x[i]) & infinite) == infinite:
                values[to] = x[i]
                columns[to] = i - first
                to += 1
