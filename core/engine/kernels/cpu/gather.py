"""Numba twins of gather.cu and copy.cu: rows by id, out of tables and cache slabs.

A gather goes in steps, so that none is compiled for more types than it has to be. `find_rows`
looks up where rows lie; it looks at no packed word. Then, for each array that rows lie in,
`copy_found` copies the raw ones, and `decode_found` or `decode_fields` decodes the packed ones.
Between them stand, for each row:

- ``source`` uint8: 0 for the table's words, 1 for its overflow, 2 + s for slab s of the cache;
- ``at`` int64: its first byte there, which a packed row has at a word;
- ``length`` int32: the most words that it may be long, 0 for a row kept raw;
- ``cluster`` uint8.

What `find_rows` lets pass lies inside its array, whatever ids, tables and maps may hold.
"""

from __future__ import annotations

import numpy as np

from ..format import (
    MAX_CACHED_ROW_WORDS,
    MAX_SLABS,
    NOT_CACHED,
    OFFSET_SHIFT,
    PACKED_BIT,
    SLAB_SHIFT,
)
from .bits import GROUP, width_of
from .fields import NUMBERS, SPARE_BYTES, decode_field_row
from .jit import njit
from .maps import AHEAD
from .memory import address_of, copy_bytes, prefetch, prefetch_bytes
from .rows import decode_row, needed_words, row_place

FROM_WORDS = 0
FROM_OVERFLOW = 1
FROM_SLABS = 2  # and the slab's number
SOURCES = FROM_SLABS + MAX_SLABS
ROWS_AHEAD = 4  # rows whose words are asked for before their turn

OFFSET_MASK = (1 << (SLAB_SHIFT - OFFSET_SHIFT)) - 1


@njit(nogil=True, cache=True)
def has_bit(bits, row):
    """Whether bit `row` is set among words of 32 bits; no bit is when there are no words."""
    word = row >> 5
    return word < bits.shape[0] and (np.int64(bits[word]) >> (row & 31)) & 1 == 1


@njit(nogil=True, cache=True)
def find_rows(
    ids,
    row_begin,
    n_rows,
    words,
    compact,
    bases,
    lengths,
    row_clusters,
    clusters,
    flags,
    moved,
    locations,
    limits,
    row_words,
    row_bytes,
    source,
    at,
    length,
    cluster,
):
    """Write where rows lie; return the position of the first one whose place is damaged, or -1.

    The rows are ``ids``, or those from `row_begin` on when there are none. ``limits[s]`` is the
    number of words that rows may take of source s. ``locations`` are what the cache's map says of
    the rows. Arrays that there are none of are empty; a table with neither `lengths` nor `flags` is
    raw.
    """
    indexed = ids.shape[0] > 0
    count = source.shape[0]
    cached = locations.shape[0] > 0
    clustered = row_clusters.shape[0] > 0
    raw = not compact and flags.shape[0] == 0
    place = np.int64(0)
    for n in range(count):
        row = row_begin + n
        if indexed:
            row = ids[n]
            if row < 0:
                row += n_rows
            if n + AHEAD < count:
                ahead = ids[n + AHEAD]
                if ahead < 0:
                    ahead += n_rows
                if compact:
                    prefetch(bases, (ahead >> 5) * 8)
                    prefetch(lengths, (ahead >> 5) * 32 * lengths.itemsize)
                if clustered:
                    prefetch(row_clusters, ahead)
        if row < 0 or row >= n_rows:
            return n
        location = locations[n] if cached else np.int64(NOT_CACHED)
        words_of = np.int64(0)  # of a packed row
        skip = np.int64(0)  # bytes of a word before a raw row
        kind = FROM_WORDS
        if location != NOT_CACHED:
            bits = np.uint64(location)
            kind = FROM_SLABS + np.int64(bits >> np.uint64(SLAB_SHIFT))
            offset = np.int64((bits >> np.uint64(OFFSET_SHIFT)) & np.uint64(OFFSET_MASK))
            place = offset >> 2
            skip = offset & 3
            if (bits >> np.uint64(PACKED_BIT)) & np.uint64(1) != 0:
                words_of = np.int64(bits & np.uint64(MAX_CACHED_ROW_WORDS))
                if words_of == 0:  # not known: as many as a packed row may have
                    words_of = min(row_words - 1, limits[kind] - place)
        else:
            if compact:
                if indexed or n == 0 or (row & 31) == 0:
                    place = row_place(bases, lengths, row, row_words)
                words_of = np.int64(lengths[row])
            elif raw:
                place = row * row_bytes >> 2
                skip = row * row_bytes & 3
            else:
                place = row * row_words
                if has_bit(flags, row):
                    words_of = row_words - 1
            if has_bit(moved, row):
                if place < 0 or place >= limits[FROM_WORDS]:
                    return n
                kind = FROM_OVERFLOW
        next_place = place + (words_of if words_of > 0 else row_words)
        if kind == FROM_OVERFLOW:
            place = np.int64(words[place]) * row_words
            words_of = np.int64(0)
        size = words_of if words_of > 0 else (skip + row_bytes + 3) >> 2
        # Not place + size > limit: a damaged base may be so large that the sum wraps around.
        if place < 0 or place > limits[kind] - size or words_of < 0 or words_of >= row_words:
            return n
        if words_of > 0 and skip > 0:
            return n
        chosen = 0
        if words_of > 0 and clustered:
            chosen = np.int64(row_clusters[row])
            if chosen >= clusters:
                return n
        source[n] = kind
        at[n] = 4 * place + skip
        length[n] = words_of
        cluster[n] = chosen
        place = next_place
    return -1


@njit(nogil=True, cache=True)
def measure_found(
    words,
    which,
    source,
    at,
    length,
    cluster,
    starts,
    chunks,
    chunk_bits,
    code_bits,
    grouped,
    uniform,
):
    """Put the exact words of packed rows that lie in source `which` into ``length``.

    Returns the position of the first damaged row, or -1.
    """
    for n in range(source.shape[0]):
        if source[n] == which and length[n] > 0:
            most = np.int64(length[n])
            need = needed_words(
                words,
                at[n] >> 2,
                most,
                starts[np.int64(cluster[n])],
                chunks,
                chunk_bits,
                code_bits,
                grouped,
                uniform,
            )
            if need < 0 or need > most:
                return n
            length[n] = need
    return -1


@njit(nogil=True, cache=True)
def prefetch_found(words, which, source, at, length, row_words, n):
    """Ask for the words of row n if there is one and it lies in source `which`."""
    if n < source.shape[0] and source[n] == which:
        count = np.int64(length[n])
        prefetch_bytes(words, at[n], 4 * (count if count > 0 else row_words))


@njit(nogil=True, cache=True)
def copy_found(words, which, source, at, length, row_words, raw, first, counts):
    """Copy the raw rows that lie in source `which`, row n of them to ``raw[first + n]``.

    `words` is that source's array. Adds the rows and their words to ``counts[which]``.
    """
    row_bytes = raw.shape[1]
    copied = 0
    for n in range(source.shape[0]):
        if source[n] == which and length[n] == 0:
            prefetch_found(words, which, source, at, length, row_words, n + ROWS_AHEAD)
            copy_bytes(raw, (first + n) * row_bytes, words, at[n], row_bytes)
            copied += 1
    counts[which, 0] += copied
    counts[which, 1] += copied * row_words


@njit(nogil=True, cache=True)
def decode_found(
    words,
    which,
    source,
    at,
    length,
    cluster,
    tables,
    starts,
    code_bits,
    grouped,
    uniform,
    row_words,
    keep_section,
    levels,
    out,
    first,
    counts,
):
    """Decode the packed rows that lie in source `which`, row n of them to ``out[first + n]``.

    `words` is that source's array. Adds the rows and their words to ``counts[which]``. Returns the
    position of the first damaged row, or -1.
    """
    x = np.empty(GROUP, out.dtype)
    codes = np.empty(GROUP, out.dtype)
    e = np.empty(GROUP, out.dtype)
    chunks = out.shape[1]
    for n in range(source.shape[0]):
        if source[n] != which or length[n] == 0:
            continue
        prefetch_found(words, which, source, at, length, row_words, n + ROWS_AHEAD)
        most = np.int64(length[n])
        c = np.int64(cluster[n])
        need = needed_words(
            words,
            at[n] >> 2,
            most,
            starts[c],
            chunks,
            width_of(out),
            code_bits,
            grouped,
            uniform,
        )
        if need < 0 or need > most:
            return n
        decode_row(
            words,
            at[n] >> 2,
            tables[c],
            starts[c],
            code_bits,
            grouped,
            uniform,
            keep_section,
            levels,
            x,
            codes,
            e,
            out[first + n],
        )
        counts[which, 0] += 1
        counts[which, 1] += need
    return -1


@njit(nogil=True, cache=True)
def decode_fields(
    words,
    which,
    source,
    at,
    length,
    cluster,
    like,
    numbers,
    values,
    group_values_bytes,
    each,
    code_bits,
    grouped,
    row_words,
    chunks,
    raw,
    first,
    counts,
):
    """Do what `decode_found` does where `decode_field_row` serves all clusters.

    `numbers`, `values`, `group_values_bytes` and `each` are those of a constants.Field, `values` as
    bytes ``[K, ...]``; `like` is any number of the type of a chunk. Row n goes to
    ``raw[first + n]``.
    """
    spare = np.empty(SPARE_BYTES, np.uint8)
    for n in range(source.shape[0]):
        if source[n] != which or length[n] == 0:
            continue
        prefetch_found(words, which, source, at, length, row_words, n + ROWS_AHEAD)
        c = np.int64(cluster[n])
        need = decode_field_row(
            like,
            address_of(words) + at[n],
            np.int64(length[n]),
            address_of(numbers) + 8 * NUMBERS * c,
            address_of(values) + values.strides[0] * c,
            group_values_bytes,
            each,
            code_bits,
            grouped,
            chunks,
            address_of(spare),
            address_of(raw) + (first + n) * raw.shape[1],
        )
        if need < 0:
            return n
        counts[which, 0] += 1
        counts[which, 1] += need
    return -1


@njit(nogil=True, cache=True)
def copy_rows(rows, stride_bytes, row_bytes, ids, n_rows, out, begin, end):
    """Copy row ``ids[n]`` of `rows`, bytes `stride_bytes` apart, to ``out[n]``, n = begin..end.

    Those of NO_ROW are left as they are.
    """
    for n in range(begin, end):
        row = np.int64(ids[n])
        if row < 0:
            row += n_rows
        ahead = n + ROWS_AHEAD
        if ahead < end:
            coming = np.int64(ids[ahead])
            if coming < 0:
                coming += n_rows
            if coming >= 0:
                prefetch_bytes(rows, coming * stride_bytes, row_bytes)
        if row >= 0:
            copy_bytes(out, n * row_bytes, rows, row * stride_bytes, row_bytes)


@njit(nogil=True, cache=True)
def find_outside(at, n_words, limit):
    """Return the first position whose run of words is not inside 0..limit, or -1."""
    for n in range(at.shape[0]):
        count = np.int64(n_words[n])
        start = np.int64(at[n])
        if count < 0 or start < 0 or start > limit - count:
            return n
    return -1


@njit(nogil=True, cache=True)
def move_rows(source_words, at, n_words, target_words, target_at, begin, end):
    """Copy runs of words, run n of ``n_words[n]`` words, n = begin..end."""
    for n in range(begin, end):
        ahead = n + ROWS_AHEAD
        if ahead < end:
            prefetch_bytes(source_words, np.int64(at[ahead]) * 4, np.int64(n_words[ahead]) * 4)
        copy_bytes(
            target_words,
            np.int64(target_at[n]) * 4,
            source_words,
            np.int64(at[n]) * 4,
            np.int64(n_words[n]) * 4,
        )
