"""Numba twins of the CUDA kernels: the readable definition of the packed row.

Every function works on a range of rows, holds no lock and starts no thread of its own. Arrays:
``rows`` and ``out`` ``[N, C]`` unsigned integers of chunk_bytes, ``raw`` the same memory as bytes
``[N, row_bytes]``; ``words`` uint32; ``bases`` int64; ``lengths`` and ``row_clusters`` unsigned;
``tables`` ``[K, sections, P]`` uint32 or, for 8-byte chunks, uint64; ``starts`` ``[K, P + 1]``
int32, the payload's bit offset of each chunk. P is C, or 32 for a uniform profile, whose only
position is repeated so that one code serves both.

A row is worked on in groups of 32 chunks, the last one possibly short: `first` is the number of
the group's first chunk, `count` its chunks, `base` the place of its first chunk in `tables` and
`starts`. Local arrays hold a group: `x` its chunks, `codes` their participation codes.
"""

from __future__ import annotations

import numpy as np

from .bits import (
    GROUP,
    LOW_WORD,
    ONE,
    SPREADS,
    TWO,
    WORD,
    ZERO,
    append_bits,
    deposit,
    end_bits,
    extract,
    low_bits,
    lowest_bit,
    popcount,
    read_bits,
    read_chunk,
    read_short,
    spread_bits,
    width_of,
)
from .jit import njit

# Codes are read and written in halves of a group: 16 codes of 3 bits fit into 64 bits.
HALF = GROUP // 2
# The lowest bit of each code of a half, by code_bits.
CODE_PLACES = np.array([0, 0xFFFF, 0x55555555, 0x249249249249], np.uint64)


@njit(nogil=True, cache=True)
def payload_bit_of(starts, i, uniform):
    """Bit of the payload at which chunk `i` starts; for i = C the payload's bits."""
    if uniform:
        return np.int64(i) * np.int64(starts[1])
    return np.int64(starts[i])


@njit(nogil=True, cache=True)
def payload_words_of(starts, chunks, uniform):
    """Words of the payload of a row."""
    return (payload_bit_of(starts, chunks, uniform) + 31) >> 5


@njit(nogil=True, cache=True)
def payload_bits_of(starts, position):
    """Bits of a chunk that are in the payload; its other bits are masked."""
    i = np.uint64(position)
    return np.int64(starts[i + ONE]) - np.int64(starts[i])


@njit(nogil=True, cache=True)
def load_masked(row, first, count, table, base, keep, x):
    """Copy a group to `x`: the bits where the mask is 1, or with `keep` those where it is 0."""
    flip = ~ZERO if keep else ZERO
    for j in range(count):
        mask = np.uint64(table[ZERO, np.uint64(base + j)]) ^ flip
        x[j] = np.uint64(row[np.uint64(first + j)]) & mask


@njit(nogil=True, cache=True)
def choose_codes(row, first, count, table, base, values, x, codes):
    """Give each chunk the first value that its masked bits equal, else 0; missing chunks get 1."""
    load_masked(row, first, count, table, base, False, x)
    for j in range(GROUP):
        codes[j] = 0 if j < count else 1
    for code in range(1, values + 1):
        for j in range(count):
            value = np.uint64(table[np.uint64(code), np.uint64(base + j)])
            found = np.uint64(x[j]) == value and codes[j] == 0
            codes[j] = np.uint64(codes[j]) | (np.uint64(code) if found else ZERO)


@njit(nogil=True, cache=True)
def all_first(codes):
    """Whether all codes of a group are 1."""
    other = ZERO
    for j in range(GROUP):
        other |= np.uint64(codes[j]) ^ ONE
    return other == ZERO


@njit(nogil=True, cache=True)
def find_misses(codes):
    """Return a word with bit j set when chunk j of a group has code 0."""
    misses = ZERO
    for j in range(GROUP):
        misses |= (ONE if codes[j] == 0 else ZERO) << np.uint64(j)
    return misses


@njit(nogil=True, cache=True)
def measure_row(row, table, starts, code_bits, grouped, uniform, x, codes):
    """Return the words of the packed row, whether or not that is less than the raw row."""
    chunks = row.shape[0]
    groups = (chunks + 31) >> 5
    exception_bits = np.int64(0)
    stored = groups
    for group in range(groups):
        first = group * GROUP
        count = min(GROUP, chunks - first)
        base = 0 if uniform else first
        choose_codes(row, first, count, table, base, (1 << code_bits) - 1, x, codes)
        for j in range(count):
            bits = width_of(row) - payload_bits_of(starts, base + j)
            exception_bits += bits if codes[j] == 0 else 0
        if grouped and all_first(codes):
            stored -= 1
    words = payload_words_of(starts, chunks, uniform) + ((exception_bits + 31) >> 5)
    return words + stored * code_bits + (((groups + 31) >> 5) if grouped else 0)


@njit(nogil=True, cache=True)
def packed_words(
    rows,
    tables,
    starts,
    code_bits,
    grouped,
    uniform,
    row_words,
    lengths,
    row_clusters,
    begin,
    end,
):
    """Write each row's packed words (0: kept raw) and its cluster, the one that packs it best."""
    x = np.zeros(GROUP, rows.dtype)
    codes = np.empty(GROUP, rows.dtype)
    for r in range(begin, end):
        best = row_words
        cluster = 0
        for c in range(tables.shape[0]):
            need = measure_row(rows[r], tables[c], starts[c], code_bits, grouped, uniform, x, codes)
            if need < best:
                best = need
                cluster = c
        lengths[r] = best if best < row_words else 0
        if row_clusters.shape[0] > 0:
            row_clusters[r] = cluster


@njit(nogil=True, cache=True)
def write_payload(row, table, starts, uniform, keep_section, levels, x, words, at):
    """Write the payload at word `at`; return the word behind it."""
    chunks = row.shape[0]
    if payload_words_of(starts, chunks, uniform) == 0:
        return at
    together = 64 // width_of(row)
    bit = at * 32
    carry = ZERO
    for first in range(0, chunks, GROUP):
        count = min(GROUP, chunks - first)
        base = 0 if uniform else first
        load_masked(row, first, count, table, base, True, x)
        extract(x, count, table, keep_section, levels, base, uniform)
        # As many chunks as fit into 64 bits for certain are appended at once.
        for j in range(0, count, together):
            begin = np.int64(starts[np.uint64(base + j)])
            end = begin
            value = ZERO
            for t in range(j, min(j + together, count)):
                value |= np.uint64(x[t]) << np.uint64(end - begin)
                end = np.int64(starts[np.uint64(base + t + 1)])
            bit, carry = append_bits(words, bit, carry, value, end - begin)
    return end_bits(words, bit, carry)


@njit(nogil=True, cache=True)
def write_group_codes(codes, code_bits, words, at):
    """Write the 32 codes of a group, `code_bits` words."""
    k = np.uint64(code_bits)
    low = ZERO
    high = ZERO
    for j in range(HALF):
        shift = np.uint64(j) * k
        low |= np.uint64(codes[j]) << shift
        high |= np.uint64(codes[j + HALF]) << shift
    half_bits = np.uint64(HALF) * k
    low |= high << half_bits
    words[at] = low & LOW_WORD
    if code_bits > 1:
        words[at + 1] = low >> WORD
    if code_bits > 2:
        words[at + 2] = high >> (np.uint64(64) - half_bits)


@njit(nogil=True, cache=True)
def write_codes(row, table, code_bits, grouped, uniform, x, codes, misses, words, at, end):
    """Write group bits and codes at word `at`; return the word behind them.

    ``misses[group]`` tells which chunks of a group are exceptions. Nothing is written from word
    `end` on: a row that another thread has changed since it was measured is cut. What it is then,
    nobody wants; there may be no memory behind it.
    """
    chunks = row.shape[0]
    groups = (chunks + 31) >> 5
    group_at = at
    group_bits = ZERO
    if grouped:
        at += (groups + 31) >> 5
    for group in range(groups):
        first = group * GROUP
        count = min(GROUP, chunks - first)
        base = 0 if uniform else first
        choose_codes(row, first, count, table, base, (1 << code_bits) - 1, x, codes)
        if grouped and all_first(codes):
            group_bits |= ONE << np.uint64(group & 31)
            misses[group] = ZERO
        else:
            if at + code_bits > end:
                misses[group:] = ZERO
                return at
            write_group_codes(codes, code_bits, words, at)
            at += code_bits
            misses[group] = find_misses(codes)
        if grouped and (group & 31 == 31 or group == groups - 1):
            words[group_at + (group >> 5)] = group_bits
            group_bits = ZERO
    return at


@njit(nogil=True, cache=True)
def write_exceptions(row, table, starts, uniform, mask_section, levels, misses, x, words, at, end):
    """Write the exceptions at word `at`, and nothing from word `end` on; see `write_codes`."""
    chunks = row.shape[0]
    bit = at * 32
    carry = ZERO
    for group in range((chunks + 31) >> 5):
        rest = misses[group]
        if rest == ZERO:
            continue
        first = group * GROUP
        count = min(GROUP, chunks - first)
        base = 0 if uniform else first
        load_masked(row, first, count, table, base, False, x)
        extract(x, count, table, mask_section, levels, base, uniform)
        while rest != ZERO:
            j = lowest_bit(rest)
            rest &= rest - ONE
            bits = width_of(row) - payload_bits_of(starts, base + j)
            if bit + max(bits, 1) > 32 * end:
                end_bits(words, bit, carry)
                return
            bit, carry = append_bits(words, bit, carry, np.uint64(x[np.uint64(j)]), bits)
    end_bits(words, bit, carry)


@njit(nogil=True, cache=True, forceinline=True)
def write_row(
    row,
    table,
    starts,
    code_bits,
    grouped,
    uniform,
    keep_section,
    levels,
    x,
    codes,
    misses,
    words,
    at,
    end,
):
    """Write a packed row from word `at` on, and nothing from word `end` on; see `write_codes`."""
    at = write_payload(row, table, starts, uniform, keep_section, levels, x, words, at)
    at = write_codes(row, table, code_bits, grouped, uniform, x, codes, misses, words, at, end)
    mask_section = keep_section + levels
    write_exceptions(row, table, starts, uniform, mask_section, levels, misses, x, words, at, end)


@njit(nogil=True, cache=True)
def copy_raw_row(source, target, begin, row_words):
    """Copy the bytes of a row that is kept raw; zeros fill its last word."""
    row_bytes = source.shape[0]
    for b in range(row_bytes):
        target[np.uint64(begin + b)] = source[b]
    for b in range(row_bytes, 4 * row_words):
        target[np.uint64(begin + b)] = 0


@njit(nogil=True, cache=True)
def encode_rows(
    rows,
    raw,
    tables,
    starts,
    code_bits,
    grouped,
    uniform,
    row_words,
    keep_section,
    levels,
    lengths,
    row_clusters,
    bases,
    words,
    word_bytes,
    begin,
    end,
):
    """Write rows begin..end, begin a multiple of 32, to `words` where bases says.

    Every word of a row is written. `word_bytes` is the memory of `words` as bytes.
    """
    x = np.zeros(GROUP, rows.dtype)
    codes = np.empty(GROUP, rows.dtype)
    misses = np.empty((rows.shape[1] + 31) >> 5, np.uint64)
    at = bases[begin >> 5]
    for r in range(begin, end):
        if lengths[r] == 0:
            copy_raw_row(raw[r], word_bytes, 4 * at, row_words)
            at += row_words
        else:
            c = np.int64(row_clusters[r]) if row_clusters.shape[0] > 0 else 0
            row = rows[r]
            table = tables[c]
            start = starts[c]
            end_at = at + np.int64(lengths[r])
            write_row(
                row,
                table,
                start,
                code_bits,
                grouped,
                uniform,
                keep_section,
                levels,
                x,
                codes,
                misses,
                words,
                at,
                end_at,
            )
            at = end_at


@njit(nogil=True, cache=True)
def count_stored_groups(words, at, groups):
    """Count the 0 bits among `groups` group bits at word `at`."""
    stored = groups
    for j in range((groups + 31) >> 5):
        bits = np.uint64(words[np.uint64(at + j)])
        stored -= popcount(bits & low_bits(min(32, groups - j * 32)))
    return stored


@njit(nogil=True, cache=True)
def is_all_first(words, group_at, group):
    """Whether the group bit says that all codes of a group are 1."""
    word = np.uint64(words[np.uint64(group_at + (group >> 5))])
    return (word >> np.uint64(group & 31)) & ONE == ONE


@njit(nogil=True, cache=True)
def zero_codes(half, code_bits, count):
    """Return a word with bit ``j * code_bits`` set when code j of a half is 0, j < count."""
    found = half
    if code_bits > 1:
        found |= half >> ONE
    if code_bits > 2:
        found |= half >> TWO
    return ~found & CODE_PLACES[code_bits] & low_bits(code_bits * max(0, min(count, HALF)))


@njit(nogil=True, cache=True)
def row_place(bases, lengths, row, row_words):
    """Return the word at which `row` starts."""
    at = bases[row >> 5]
    for r in range(row & ~31, row):
        length = np.int64(lengths[r])
        at += length if length > 0 else row_words
    return at


@njit(nogil=True, cache=True)
def words_of_block(lengths, block, row_words):
    """Return the words of the rows that share an entry of the bases."""
    total = np.int64(0)
    for r in range(32 * block, min(32 * (block + 1), lengths.shape[0])):
        length = np.int64(lengths[r])
        total += length if length > 0 else row_words
    return total


@njit(nogil=True, cache=True)
def needed_words(words, at, length, starts, chunks, chunk_bits, code_bits, grouped, uniform):
    """Return the words that a packed row's own codes ask for, or -1 when `length` is too short."""
    groups = (chunks + 31) >> 5
    need = payload_words_of(starts, chunks, uniform)
    stored = groups
    group_at = at + need
    if grouped:
        need += (groups + 31) >> 5
        if need > length:
            return np.int64(-1)
        stored = count_stored_groups(words, group_at, groups)
    bit = (at + need) * 32
    need += stored * code_bits
    if need > length:
        return np.int64(-1)
    exception_bits = np.int64(0)
    for group in range(groups):
        if grouped and is_all_first(words, group_at, group):
            continue
        first = group * GROUP
        count = min(GROUP, chunks - first)
        low = zero_codes(read_short(words, bit), code_bits, count)
        high = zero_codes(read_short(words, bit + HALF * code_bits), code_bits, count - HALF)
        bit += GROUP * code_bits
        if uniform:
            misses = popcount(low) + popcount(high)
            exception_bits += misses * (chunk_bits - payload_bits_of(starts, 0))
        elif low | high != ZERO:
            for j in range(count):
                zeros = low if j < HALF else high
                zero = (zeros >> np.uint64((j & (HALF - 1)) * code_bits)) & ONE
                exception_bits += np.int64(zero) * (chunk_bits - payload_bits_of(starts, first + j))
    return need + ((exception_bits + 31) >> 5)


@njit(nogil=True, cache=True)
def check_rows(
    words,
    bases,
    lengths,
    row_clusters,
    starts,
    chunks,
    chunk_bits,
    code_bits,
    grouped,
    uniform,
    row_words,
    ids,
    begin,
    end,
):
    """Return the first row of the range (of ``ids[begin:end]`` if given) that is damaged, or -1.

    A row is sound when it lies inside `words` and is exactly as long as its codes ask for. Of rows
    in order, those of a block whose lengths do not fill it up to the next base are all damaged, as
    for the CUDA kernel, which copies what the bases say.
    """
    limit = words.shape[0] - 4
    n_rows = lengths.shape[0]
    indexed = ids.shape[0] > 0
    at = np.int64(0)
    for n in range(begin, end):
        r = n
        if indexed:
            r = ids[n]
            if r < 0:
                r += n_rows
        if indexed or n == begin or (r & 31) == 0:
            # A damaged base is harmless here: only lengths are read before `at` is looked at.
            at = row_place(bases, lengths, r, row_words)
            block = r >> 5
            if not indexed and bases[block + 1] - bases[block] != words_of_block(
                lengths, block, row_words
            ):
                return r
        length = np.int64(lengths[r])
        size = length if length > 0 else row_words
        # Not at + size > limit: a damaged base may be so large that the sum wraps around.
        if at < 0 or at > limit - size or length >= row_words:
            return r
        if length > 0:
            c = np.int64(row_clusters[r]) if row_clusters.shape[0] > 0 else 0
            if c >= starts.shape[0]:
                return r
            need = needed_words(
                words, at, length, starts[c], chunks, chunk_bits, code_bits, grouped, uniform
            )
            if need != length:
                return r
        at += size
    return -1


@njit(nogil=True, cache=True)
def read_payload(words, bit, starts, base, count, x):
    """Copy the payload of a group, which starts at `bit`, to `x`; other bits may stand above it."""
    bit -= np.int64(starts[np.uint64(base)])
    for j in range(count):
        x[j] = read_chunk(words, bit + np.int64(starts[np.uint64(base + j)]), x)


@njit(nogil=True, cache=True)
def read_spread_payload(words, bit, table, starts, base, count, x):
    """Copy the payload of a group, which starts at `bit`, to its places in `x`, 0 elsewhere."""
    bit -= np.int64(starts[np.uint64(base)])
    for j in range(count):
        kept = ~np.uint64(table[ZERO, np.uint64(base + j)])
        begin = bit + np.int64(starts[np.uint64(base + j)])
        x[j] = spread_bits(read_chunk(words, begin, x), kept)


@njit(nogil=True, cache=True)
def read_codes(words, bit, code_bits, codes):
    """Copy the 32 codes of a group to `codes`."""
    k = np.uint64(code_bits)
    mask = low_bits(code_bits)
    low = read_short(words, bit)
    high = read_short(words, bit + HALF * code_bits)
    for j in range(HALF):
        shift = np.uint64(j) * k
        codes[j] = (low >> shift) & mask
        codes[j + HALF] = (high >> shift) & mask


@njit(nogil=True, cache=True)
def decode_row(
    words, at, table, starts, code_bits, grouped, uniform, keep_section, levels, x, codes, e, out
):
    """Rebuild one sound packed row that starts at word `at`; `e` is for a group's exceptions."""
    chunks = out.shape[0]
    groups = (chunks + 31) >> 5
    group_at = at + payload_words_of(starts, chunks, uniform)
    stored = groups
    code_at = group_at
    if grouped:
        stored = count_stored_groups(words, group_at, groups)
        code_at += (groups + 31) >> 5
    code_bit = code_at * 32
    exception_bit = (code_at + stored * code_bits) * 32
    for group in range(groups):
        first = group * GROUP
        count = min(GROUP, chunks - first)
        base = 0 if uniform else first
        payload_bit = payload_bit_of(starts, first, uniform)
        if payload_bit < payload_bit_of(starts, first + count, uniform):
            if SPREADS:
                read_spread_payload(words, at * 32 + payload_bit, table, starts, base, count, x)
            else:
                read_payload(words, at * 32 + payload_bit, starts, base, count, x)
                deposit(x, count, table, keep_section, levels, base, uniform)
                for j in range(count):
                    x[j] = np.uint64(x[j]) & ~np.uint64(table[ZERO, np.uint64(base + j)])
        else:
            for j in range(count):
                x[j] = 0
        # From here on x holds the payload's bits in place and 0 where the mask is 1.
        if grouped and is_all_first(words, group_at, group):
            for j in range(count):
                out[np.uint64(first + j)] = np.uint64(x[j]) | np.uint64(
                    table[ONE, np.uint64(base + j)]
                )
            continue
        read_codes(words, code_bit, code_bits, codes)
        code_bit += GROUP * code_bits
        for code in range(1, 1 << code_bits):
            for j in range(count):
                value = np.uint64(table[np.uint64(code), np.uint64(base + j)])
                x[j] = np.uint64(x[j]) | (value if codes[j] == code else ZERO)
        misses = find_misses(codes) & low_bits(count)
        if SPREADS:
            while misses != ZERO:
                j = np.uint64(lowest_bit(misses))
                misses &= misses - ONE
                place = np.uint64(base) + j
                found = read_chunk(words, exception_bit, out)
                x[j] |= spread_bits(found, np.uint64(table[ZERO, place]))
                exception_bit += width_of(out) - payload_bits_of(starts, place)
        elif misses != ZERO:
            while misses != ZERO:
                j = lowest_bit(misses)
                misses &= misses - ONE
                e[np.uint64(j)] = read_bits(words, exception_bit)
                exception_bit += width_of(out) - payload_bits_of(starts, base + j)
            deposit(e, count, table, keep_section + levels, levels, base, uniform)
            for j in range(count):
                mask = np.uint64(table[ZERO, np.uint64(base + j)])
                x[j] = np.uint64(x[j]) | (np.uint64(e[j]) & mask if codes[j] == 0 else ZERO)
        for j in range(count):
            out[np.uint64(first + j)] = x[j]
