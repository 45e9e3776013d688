"""Numba twins of the CUDA kernels: the readable definition of the packed row.

Every function works on a range of rows, holds no lock and starts no thread of its own. Arrays:
``rows`` and ``out`` ``[N, C]`` unsigned integers of chunk_bytes; ``words`` uint32; ``bases`` int64;
``lengths`` and ``row_clusters`` unsigned; ``tables`` ``[K, sections, positions]`` uint32 or, for
8-byte chunks, uint64; ``starts`` ``[K, C + 1]`` int32, the payload's bit offset of each chunk
(uniform: ``[K, 2]``, 0 and the payload bits of one chunk).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .bits import deposit, extract, popcount, read_bits, read_short, write_bits

ONE = np.uint64(1)
ZERO = np.uint64(0)


@njit(nogil=True, cache=True)
def count_bits(rows, counts, begin, end):
    """Add to ``counts[i, b]`` how many of the rows begin..end have bit b of chunk i set."""
    chunks = rows.shape[1]
    bits = counts.shape[1]
    for r in range(begin, end):
        for i in range(chunks):
            x = rows[r, i]
            for b in range(bits):
                counts[i, b] += (x >> b) & 1


@njit(nogil=True, cache=True, inline="always")
def code_of(x, table, position, mask, values):
    """Participation code of a chunk: the first value that its masked bits equal, else 0."""
    masked = x & mask
    for j in range(values):
        if masked == np.uint64(table[1 + j, position]):
            return j + 1
    return 0


@njit(nogil=True, cache=True)
def payload_words_of(starts, chunks, uniform):
    """Words of the payload of a row."""
    bits = starts[1] * chunks if uniform else starts[chunks]
    return (bits + 31) >> 5


@njit(nogil=True, cache=True)
def measure_row(row, table, starts, values, code_bits, grouped, uniform):
    """Return the words of the packed row, whether or not that is less than the raw row."""
    chunks = row.shape[0]
    groups = (chunks + 31) >> 5
    exception_bits = 0
    stored = 0
    if uniform and values == 1 and not grouped:
        mask = np.uint64(table[0, 0])
        value = np.uint64(table[1, 0])
        missed = 0
        for i in range(chunks):
            missed += np.int64((np.uint64(row[i]) & mask) != value)
        exception_bits = missed * popcount(mask)
    else:
        position = 0
        for group in range(groups):
            needed = False
            for i in range(group * 32, min(group * 32 + 32, chunks)):
                if not uniform:
                    position = i
                mask = np.uint64(table[0, position])
                code = code_of(np.uint64(row[i]), table, position, mask, values)
                if code != 1:
                    needed = True
                    if code == 0:
                        exception_bits += popcount(mask)
            if needed:
                stored += 1
    words = payload_words_of(starts, chunks, uniform) + ((exception_bits + 31) >> 5)
    if grouped:
        return words + ((groups + 31) >> 5) + stored * code_bits
    return words + groups * code_bits


@njit(nogil=True, cache=True)
def packed_words(
    rows, tables, starts, code_bits, grouped, uniform, row_words, lengths, row_clusters, begin, end
):
    """Write each row's packed words (0: kept raw) and its cluster, the one that packs it best."""
    values = (1 << code_bits) - 1
    for r in range(begin, end):
        best = row_words
        cluster = 0
        for c in range(tables.shape[0]):
            need = measure_row(rows[r], tables[c], starts[c], values, code_bits, grouped, uniform)
            if need < best:
                best = need
                cluster = c
        lengths[r] = best if best < row_words else 0
        if row_clusters.shape[0] > 0:
            row_clusters[r] = cluster


@njit(nogil=True, cache=True)
def encode_row(
    row, table, starts, code_bits, grouped, uniform, keep_section, levels, codes, words, at
):
    """Write one packed row to the zeroed `words` at word `at`; `codes` is scratch for a row."""
    chunks = row.shape[0]
    groups = (chunks + 31) >> 5
    values = (1 << code_bits) - 1
    chunk_bits = 1 << levels
    bit = at * 32
    position = 0
    for i in range(chunks):
        if not uniform:
            position = i
        mask = np.uint64(table[0, position])
        x = np.uint64(row[i])
        codes[i] = code_of(x, table, position, mask, values)
        keep_bits = chunk_bits - popcount(mask)
        if keep_bits > 0:
            write_bits(
                words, bit, extract(x & ~mask, table, keep_section, levels, position), keep_bits
            )
        bit += keep_bits
    at += payload_words_of(starts, chunks, uniform)
    if grouped:
        group_at = at
        at += (groups + 31) >> 5
    for group in range(groups):
        first = group * 32
        last = min(first + 32, chunks)
        needed = not grouped
        for i in range(first, last):
            if codes[i] != 1:
                needed = True
        if not needed:
            words[group_at + (group >> 5)] |= np.uint32(1 << (group & 31))
            continue
        bit = at * 32
        for i in range(first, first + 32):
            code = np.uint64(codes[i]) if i < last else ONE
            write_bits(words, bit, code, code_bits)
            bit += code_bits
        at += code_bits
    bit = at * 32
    position = 0
    for i in range(chunks):
        if codes[i] == 0:
            if not uniform:
                position = i
            mask = np.uint64(table[0, position])
            bits = popcount(mask)
            moved = extract(
                np.uint64(row[i]) & mask, table, keep_section + levels, levels, position
            )
            write_bits(words, bit, moved, bits)
            bit += bits


@njit(nogil=True, cache=True)
def copy_raw_row(row, words, at):
    """Write a row that is kept raw to the zeroed `words` at word `at`."""
    size = row.itemsize
    for i in range(row.shape[0]):
        x = np.uint64(row[i])
        byte = i * size
        j = at + (byte >> 2)
        words[j] |= np.uint32((x << np.uint64(8 * (byte & 3))) & np.uint64(0xFFFFFFFF))
        if size == 8:
            words[j + 1] = np.uint32(x >> np.uint64(32))


@njit(nogil=True, cache=True)
def encode_rows(
    rows,
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
    begin,
    end,
):
    """Write rows begin..end, begin a multiple of 32, to the zeroed `words` where bases says."""
    codes = np.empty(rows.shape[1], np.uint8)
    at = bases[begin >> 5]
    for r in range(begin, end):
        if lengths[r] == 0:
            copy_raw_row(rows[r], words, at)
            at += row_words
        else:
            c = np.int64(row_clusters[r]) if row_clusters.shape[0] > 0 else 0
            encode_row(
                rows[r],
                tables[c],
                starts[c],
                code_bits,
                grouped,
                uniform,
                keep_section,
                levels,
                codes,
                words,
                at,
            )
            at += np.int64(lengths[r])


@njit(nogil=True, cache=True)
def count_stored_groups(words, at, groups):
    """Count the 0 bits among `groups` group bits at word `at`."""
    stored = groups
    for j in range((groups + 31) >> 5):
        bits = np.uint32(words[at + j])
        rest = groups - j * 32
        if rest < 32:
            bits &= np.uint32((1 << rest) - 1)
        stored -= popcount(bits)
    return stored


@njit(nogil=True, cache=True)
def row_place(bases, lengths, row, row_words):
    """Return the word at which `row` starts."""
    at = bases[row >> 5]
    for r in range(row & ~31, row):
        length = np.int64(lengths[r])
        at += length if length > 0 else row_words
    return at


@njit(nogil=True, cache=True)
def needed_words(words, at, length, table, starts, chunks, code_bits, grouped, uniform):
    """Return the words that a packed row's own codes ask for, or -1 when `length` is too short."""
    groups = (chunks + 31) >> 5
    need = payload_words_of(starts, chunks, uniform)
    stored = groups
    group_at = at + need
    if grouped:
        need += (groups + 31) >> 5
        if need > length:
            return -1
        stored = count_stored_groups(words, group_at, groups)
    code_at = at + need
    need += stored * code_bits
    if need > length:
        return -1
    code_mask = np.uint64((1 << code_bits) - 1)
    exception_bits = 0
    bit = code_at * 32
    for group in range(groups):
        if grouped and (words[group_at + (group >> 5)] >> np.uint32(group & 31)) & np.uint32(1):
            continue
        first = group * 32
        count = min(32, chunks - first)
        if code_bits == 1:
            misses = (~np.uint64(words[bit >> 5])) & ((ONE << np.uint64(count)) - ONE)
            if misses != ZERO:
                if uniform:
                    exception_bits += popcount(misses) * popcount(table[0, 0])
                else:
                    for j in range(count):
                        if (misses >> np.uint64(j)) & ONE:
                            exception_bits += popcount(table[0, first + j])
        else:
            for j in range(count):
                if read_short(words, bit + j * code_bits) & code_mask == ZERO:
                    exception_bits += popcount(table[0, 0 if uniform else first + j])
        bit += 32 * code_bits
    return need + ((exception_bits + 31) >> 5)


@njit(nogil=True, cache=True)
def check_rows(
    words,
    bases,
    lengths,
    row_clusters,
    tables,
    starts,
    chunks,
    code_bits,
    grouped,
    uniform,
    row_words,
    ids,
    begin,
    end,
):
    """Return the first row of the range (of ``ids[begin:end]`` if given) that is damaged, or -1.

    A row is sound when it lies inside `words` and is exactly as long as its codes ask for.
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
            # A base must be inside before the rows of its block are walked.
            at = row_place(bases, lengths, r, row_words)
        length = np.int64(lengths[r])
        size = length if length > 0 else row_words
        if at < 0 or at + size > limit or length >= row_words:
            return r
        if length > 0:
            c = np.int64(row_clusters[r]) if row_clusters.shape[0] > 0 else 0
            if c >= tables.shape[0]:
                return r
            need = needed_words(
                words, at, length, tables[c], starts[c], chunks, code_bits, grouped, uniform
            )
            if need != length:
                return r
        at += size
    return -1


@njit(nogil=True, cache=True)
def decode_row(
    words,
    at,
    table,
    starts,
    code_bits,
    grouped,
    uniform,
    field_low,
    field_bits,
    keep_section,
    levels,
    out,
):
    """Rebuild one sound packed row that starts at word `at`."""
    chunks = out.shape[0]
    groups = (chunks + 31) >> 5
    code_mask = np.uint64((1 << code_bits) - 1)
    group_at = at + payload_words_of(starts, chunks, uniform)
    stored = groups
    code_at = group_at
    if grouped:
        stored = count_stored_groups(words, group_at, groups)
        code_at += (groups + 31) >> 5
    exception_bit = (code_at + stored * code_bits) * 32
    code_bit = code_at * 32
    bit = at * 32
    wide = levels == 6
    low_mask = (ONE << np.uint64(field_low)) - ONE
    shift = np.uint64(field_bits)
    position = 0
    mask = np.uint64(table[0, 0])
    keep_bits = starts[1]
    payload_mask = ~ZERO if keep_bits == 64 else (ONE << np.uint64(keep_bits)) - ONE
    for group in range(groups):
        first = group * 32
        last = min(first + 32, chunks)
        full = grouped and (words[group_at + (group >> 5)] >> np.uint32(group & 31)) & np.uint32(
            1
        ) == np.uint32(1)
        for i in range(first, last):
            if uniform:
                if keep_bits == 0:
                    x = ZERO
                else:
                    x = (read_bits(words, bit) if wide else read_short(words, bit)) & payload_mask
                    bit += keep_bits
                    if field_bits > 0:
                        x = (x & low_mask) | ((x & ~low_mask) << shift)
                    else:
                        x = deposit(x, table, keep_section, levels, 0) & ~mask
            else:
                position = i
                mask = np.uint64(table[0, i])
                x = read_bits(words, bit) if wide else read_short(words, bit)
                bit = at * 32 + starts[i + 1]
                x = deposit(x, table, keep_section, levels, i) & ~mask
            if full:
                x |= np.uint64(table[1, position])
            else:
                code = read_short(words, code_bit + (i - first) * code_bits) & code_mask
                if code != ZERO:
                    x |= np.uint64(table[np.int64(code), position])
                else:
                    e = (
                        read_bits(words, exception_bit)
                        if wide
                        else read_short(words, exception_bit)
                    )
                    exception_bit += popcount(mask)
                    x |= deposit(e, table, keep_section + levels, levels, position) & mask
            out[i] = x
        if not full:
            code_bit += 32 * code_bits


@njit(nogil=True, cache=True)
def decode_raw_row(words, at, out):
    """Copy a row that was kept raw."""
    size = out.itemsize
    for i in range(out.shape[0]):
        byte = i * size
        j = at + (byte >> 2)
        x = np.uint64(words[j]) >> np.uint64(8 * (byte & 3))
        if size == 8:
            x |= np.uint64(words[j + 1]) << np.uint64(32)
        out[i] = x


@njit(nogil=True, cache=True)
def decode_rows(
    words,
    bases,
    lengths,
    row_clusters,
    tables,
    starts,
    code_bits,
    grouped,
    uniform,
    field_low,
    field_bits,
    row_words,
    keep_section,
    levels,
    ids,
    row_begin,
    out,
    begin,
    end,
):
    """Decode rows row_begin + begin..end, or ``ids[begin:end]``, to ``out[begin:end]``.

    The rows must have passed `check_rows`, the ids `check_ids`.
    """
    n_rows = lengths.shape[0]
    indexed = ids.shape[0] > 0
    at = np.int64(0)
    for n in range(begin, end):
        r = row_begin + n
        if indexed:
            r = ids[n]
            if r < 0:
                r += n_rows
        if indexed or n == begin or (r & 31) == 0:
            at = row_place(bases, lengths, r, row_words)
        length = np.int64(lengths[r])
        if length == 0:
            decode_raw_row(words, at, out[n])
            at += row_words
        else:
            c = np.int64(row_clusters[r]) if row_clusters.shape[0] > 0 else 0
            decode_row(
                words,
                at,
                tables[c],
                starts[c],
                code_bits,
                grouped,
                uniform,
                field_low[c],
                field_bits[c],
                keep_section,
                levels,
                out[n],
            )
            at += length


@njit(nogil=True, cache=True)
def check_ids(ids, n_rows):
    """Return the first position whose id is not in -n_rows..n_rows - 1, or -1."""
    for n in range(ids.shape[0]):
        if ids[n] < -n_rows or ids[n] >= n_rows:
            return n
    return -1
