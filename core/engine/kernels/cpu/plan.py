"""What a planner counts: agreeing bits, frequent values, sizes under many options at once.

``columns`` are rows the other way around, ``[positions, n]``, chunks as unsigned integers: a loop
over the rows of a position is a loop over neighbours in memory, which LLVM turns into vector
instructions.
"""

from __future__ import annotations

import numpy as np

from ..candidates import DIFFERING
from .bits import popcount
from .jit import njit

MIX = np.uint64(0x9E3779B97F4A7C15)
COUNTED_BYTES = 256  # of a row, whose counters fit the cache


@njit(nogil=True, cache=True)
def count_bits(raw, counts, begin, end):
    """Add to ``counts[i, b]`` how many of the rows begin..end have bit b of byte i set.

    Counted in bytes first, of as many rows as these can count: vectors of them are the longest.
    """
    row_bytes = raw.shape[1]
    few = np.empty((8, COUNTED_BYTES), np.uint8)
    for first in range(0, row_bytes, COUNTED_BYTES):
        width = min(COUNTED_BYTES, row_bytes - first)
        for start in range(begin, end, 255):
            few[:] = 0
            for r in range(start, min(start + 255, end)):
                row = raw[r, first : first + width]
                for bit in range(8):
                    counted, shift = few[bit], np.uint8(bit)
                    for i in range(width):
                        counted[i] += (row[i] >> shift) & np.uint8(1)
            for bit in range(8):
                for i in range(width):
                    counts[first + i, bit] += few[bit, i]


@njit(nogil=True, cache=True)
def agreed_masks(counts, n_rows, numbers, masks):
    """Write the masks of all candidates, from ``counts[byte, bit]`` of the rows that have it set.

    Columns of ``numbers`` are those of `CandidateTable`, ``masks`` uint64.
    """
    row_bytes = counts.shape[0]
    sums = np.zeros(64, np.int64)
    for c in range(numbers.shape[0]):
        width, uniform, agreed, field, first = numbers[c, :5]
        chunks = row_bytes // width
        if uniform:
            sums[:] = 0
        for i in range(chunks):
            mask = np.uint64(0)
            for byte in range(width):
                for bit in range(8):
                    place = 8 * byte + bit
                    count = counts[i * width + byte, bit]
                    if uniform:
                        sums[place] += count
                    elif max(count, n_rows - count) >= agreed:
                        mask |= np.uint64(1) << np.uint64(place)
            if not uniform:
                masks[first + i] = mask | np.uint64(field)
        if uniform:
            mask = np.uint64(0)
            for place in range(8 * width):
                if max(sums[place], n_rows * chunks - sums[place]) >= agreed:
                    mask |= np.uint64(1) << np.uint64(place)
            masks[first] = mask | np.uint64(field)


@njit(nogil=True, cache=True)
def frequent_values(columns, masks, keys, counts, places, multiplier, shift, values):
    """Write the most frequent masked chunks of each position to ``values[:, position]``.

    Equal counts go to the smaller value; ranks left over repeat the first value. A chunk x has its
    place in the hash table from ``x * multiplier >> shift`` on; ``counts`` are zeros, and are again
    at the end, ``places`` has room for the place of every different chunk.
    """
    n = columns.shape[1]
    last = np.uint64(len(keys) - 1)
    one = np.uint64(1)
    ranks = values.shape[0]
    top = np.zeros(ranks, np.int64)
    for i in range(columns.shape[0]):
        column = columns[i]
        mask = masks[i]
        different = 0
        for r in range(n):
            x = column[r] & mask
            place = (np.uint64(x) * multiplier) >> shift
            while counts[place] != 0 and keys[place] != x:
                place = (place + one) & last
            if counts[place] == 0:
                keys[place] = x
                places[different] = place
                different += 1
            counts[place] += 1
        top[:] = 0
        for d in range(different):
            place = places[d]
            count = counts[place]
            x = keys[place]
            counts[place] = 0
            j = ranks
            while j > 0 and (top[j - 1] < count or (top[j - 1] == count and values[j - 1, i] > x)):
                if j < ranks:
                    top[j] = top[j - 1]
                    values[j, i] = values[j - 1, i]
                j -= 1
            if j < ranks:
                top[j] = count
                values[j, i] = x
        for j in range(1, ranks):
            if top[j] == 0:
                values[j, i] = values[0, i]


@njit(nogil=True, cache=True)
def sizes_by_option(columns, masks, values, uniform, unit_bits, room, totals):
    """Add up packed sizes and rows with exceptions for code_bits 1 to 3, three sums each.

    The last of `totals` is for the masks that are not that of the first position.
    ``values`` ``[7, positions]`` are ordered by frequency, so the options differ only in how many
    of them have a code. The sizes are those not grouped, and grouped; a row that would not shrink
    counts as it is. They are in units of ``unit_bits``, to which each part of a row is rounded up.
    ``room`` int32 ``[5, n]`` is written.
    """
    chunks, n = columns.shape
    groups = (chunks + 31) >> 5
    # Masked bits of chunks without a code, by code_bits, and stored groups, of each row.
    group, miss1, miss2, miss3, stored = room[0], room[1], room[2], room[3], room[4]
    room[:] = 0
    chunk_bits = 8 * columns.itemsize
    payload = 0
    for begin in range(0, chunks, 32):
        group[:] = 0
        for i in range(begin, min(begin + 32, chunks)):
            p = 0 if uniform else i
            column = columns[i]
            mask = masks[p]
            bits = np.int32(popcount(mask))
            payload += chunk_bits - bits
            a, b, c, d = values[0, p], values[1, p], values[2, p], values[3, p]
            e, f, g = values[4, p], values[5, p], values[6, p]
            for r in range(n):
                x = column[r] & mask
                one = x == a
                three = one | (x == b) | (x == c)
                seven = three | (x == d) | (x == e) | (x == f) | (x == g)
                group[r] += np.int32(0) if one else bits
                miss2[r] += np.int32(0) if three else bits
                miss3[r] += np.int32(0) if seven else bits
        for r in range(n):
            miss1[r] += group[r]
            stored[r] += group[r] != 0
    raw = (chunks * chunk_bits + unit_bits - 1) // unit_bits
    payload = (payload + unit_bits - 1) // unit_bits
    group_bits = (groups + unit_bits - 1) // unit_bits
    code_units = 32 // unit_bits
    for r in range(n):
        for k in range(1, 4):
            miss = miss1[r] if k == 1 else (miss2[r] if k == 2 else miss3[r])
            size = payload + (miss + unit_bits - 1) // unit_bits
            totals[3 * k - 3] += min(size + groups * k * code_units, raw)
            totals[3 * k - 2] += min(size + group_bits + stored[r] * k * code_units, raw)
            totals[3 * k - 1] += miss != 0
    for mask in masks:
        totals[DIFFERING] += mask != masks[0]


@njit(nogil=True, cache=True)
def nearest_centers(rows, centers, nearest):
    """Write each row's nearest center in Hamming distance; return the sum of the distances."""
    total = 0
    for r in range(rows.shape[0]):
        best = np.int64(1) << 62
        for c in range(centers.shape[0]):
            distance = 0
            for i in range(rows.shape[1]):
                distance += popcount(rows[r, i] ^ centers[c, i])
            if distance < best:
                best = distance
                nearest[r] = c
        total += best
    return total
