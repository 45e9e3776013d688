"""Rows of a compact table by id, found and decoded in one go.

What `gather.find_rows` and `gather.decode_fields` do in two steps, for the most usual table:
compact, with a field (see constants.Field), no cache. `prepared.PreparedTable` makes what is read
here. Few arguments of few types keep the cost of a call low: the table comes as an array of
addresses and sizes, int64 each, by their place below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from .fields import NUMBERS, SPARE_BYTES, decode_field_row
from .groups import words_before_8, words_before_16
from .memory import (
    address_of,
    call_at,
    copy_between,
    load_8,
    load_16,
    load_32,
    load_signed,
    numbers_at,
    prefetch_line,
    prefetch_lines,
)

N_ROWS = 0
ROW_BYTES = 1
ROW_WORDS = 2
WORDS = 3
WORDS_LIMIT = 4  # words that rows may take
BASES = 5
LENGTHS = 6
LENGTH_BYTES = 7
ROW_CLUSTERS = 8  # 0: there is one cluster
CLUSTERS = 9
MOVED = 10  # 0: no row has moved
OVERFLOW = 11
OVERFLOW_LIMIT = 12
FIELDS = 13
VALUES = 14
CLUSTER_VALUES_BYTES = 15
GROUP_VALUES_BYTES = 16
EACH = 17
CODE_BITS = 18
GROUPED = 19
CHUNKS = 20
BATCH = 21  # rows that take each step together, up to MAX_BATCH, a power of two
SIZES = 22

MAX_BATCH = 8
DAMAGED = -1


@njit(nogil=True, cache=True, forceinline=True)
def length_of(lengths, length_bytes, row):
    """Return the length of a row."""
    if length_bytes == 1:
        return load_8(lengths + row)
    if length_bytes == 2:
        return load_16(lengths + 2 * row)
    return load_32(lengths + 4 * row)


@njit(nogil=True, cache=True, forceinline=True)
def find_row(table, row):
    """Return where a row starts, an address, and its words: 0 for a raw one, or DAMAGED.

    `table` is an address.
    """
    row_words = load_signed(table + 8 * ROW_WORDS)
    lengths = load_signed(table + 8 * LENGTHS)
    length_bytes = load_signed(table + 8 * LENGTH_BYTES)
    n_rows = load_signed(table + 8 * N_ROWS)
    if row < 0 or row >= n_rows:
        return np.int64(0), np.int64(DAMAGED)
    place = load_signed(load_signed(table + 8 * BASES) + 8 * (row >> 5))
    first = row & ~31
    if length_bytes <= 2 and first + 32 <= n_rows:
        if length_bytes == 1:
            place += words_before_8(lengths + first, row & 31, row_words)
        else:
            place += words_before_16(lengths + 2 * first, row & 31, row_words)
    else:
        for other in range(first, row):
            length = length_of(lengths, length_bytes, other)
            place += length if length > 0 else row_words
    words_of = length_of(lengths, length_bytes, row)
    start = load_signed(table + 8 * WORDS)
    limit = load_signed(table + 8 * WORDS_LIMIT)
    moved = load_signed(table + 8 * MOVED)
    if moved != 0 and (load_32(moved + 4 * (row >> 5)) >> (row & 31)) & 1 == 1:
        if place < 0 or place >= limit:
            return np.int64(0), np.int64(DAMAGED)
        place = load_32(start + 4 * place) * row_words
        start = load_signed(table + 8 * OVERFLOW)
        limit = load_signed(table + 8 * OVERFLOW_LIMIT)
        words_of = np.int64(0)
    size = words_of if words_of > 0 else row_words
    # Not place + size > limit: a damaged base may be so large that the sum wraps around.
    if place < 0 or place > limit - size or words_of >= row_words:
        return np.int64(0), np.int64(DAMAGED)
    return start + 4 * place, words_of


@njit(nogil=True, cache=True, forceinline=True)
def row_at(ids, n, n_rows):
    """Return the row that an id stands for."""
    row = np.int64(ids[n])
    return row + n_rows if row < 0 else row


@njit(nogil=True, cache=True)
def gather_compact(numbers, like, ids, target, begin, end):
    """Gather rows ``ids[begin:end]`` to an address, row 0 of them all; return their words.

    `numbers` are SIZES numbers, `like` is any number of the type of a chunk. Returns -1 - n when
    the row of ``ids[n]`` is damaged.
    """
    table = address_of(numbers)
    n_rows = load_signed(table + 8 * N_ROWS)
    row_bytes = load_signed(table + 8 * ROW_BYTES)
    row_words = load_signed(table + 8 * ROW_WORDS)
    bases = load_signed(table + 8 * BASES)
    lengths = load_signed(table + 8 * LENGTHS)
    length_bytes = load_signed(table + 8 * LENGTH_BYTES)
    row_clusters = load_signed(table + 8 * ROW_CLUSTERS)
    clusters = load_signed(table + 8 * CLUSTERS)
    fields = load_signed(table + 8 * FIELDS)
    values = load_signed(table + 8 * VALUES)
    cluster_values_bytes = load_signed(table + 8 * CLUSTER_VALUES_BYTES)
    group_values_bytes = load_signed(table + 8 * GROUP_VALUES_BYTES)
    each = load_signed(table + 8 * EACH) != 0
    code_bits = load_signed(table + 8 * CODE_BITS)
    grouped = load_signed(table + 8 * GROUPED) != 0
    chunks = load_signed(table + 8 * CHUNKS)
    batch = load_signed(table + 8 * BATCH)
    spare = np.empty(SPARE_BYTES, np.uint8)
    at = np.empty(2 * MAX_BATCH, np.int64)
    length = np.empty(2 * MAX_BATCH, np.int64)
    places = 2 * batch - 1
    total = np.int64(0)
    # Three steps: the lengths of a batch are asked for, then its words, then it is decoded. A batch
    # takes each of them while the one before it takes the next.
    for first in range(begin - 2 * batch, end, batch):
        for n in range(max(begin, first + 2 * batch), min(first + 3 * batch, end)):
            row = row_at(ids, n, n_rows)
            prefetch_line(bases + 8 * (row >> 5))
            prefetch_line(lengths + length_bytes * (row & ~31))
            if length_bytes > 1:
                prefetch_line(lengths + length_bytes * (row | 31))
            if row_clusters != 0:
                prefetch_line(row_clusters + row)
        for n in range(max(begin, first + batch), min(first + 2 * batch, end)):
            start, words_of = find_row(table, row_at(ids, n, n_rows))
            at[n & places] = start
            length[n & places] = words_of
            if words_of >= 0:
                prefetch_lines(start, 4 * (words_of if words_of > 0 else row_words))
        for n in range(max(begin, first), min(first + batch, end)):
            words_of = length[n & places]
            to = target + n * row_bytes
            if words_of == 0:
                copy_between(to, at[n & places], row_bytes)
                total += row_words
                continue
            if words_of < 0:
                return -1 - n
            cluster = np.int64(0)
            if row_clusters != 0:
                cluster = load_8(row_clusters + row_at(ids, n, n_rows))
                if cluster >= clusters:
                    return -1 - n
            need = decode_field_row(
                like,
                at[n & places],
                words_of,
                fields + 8 * NUMBERS * cluster,
                values + cluster_values_bytes * cluster,
                group_values_bytes,
                each,
                code_bits,
                grouped,
                chunks,
                address_of(spare),
                to,
            )
            if need < 0:
                return -1 - n
            total += need
    return total


# What a thread of a team reads of a gather, int64 each, by its place; behind it, for each thread,
# goes what `gather_compact` returns.
THREAD_NUMBER = 0  # addresses of C functions, see team.Team
THREAD_COUNT = 1
TABLE = 2
IDS = 3
N_IDS = 4
TARGET = 5
RESULTS = 6


def part_of_gather(like: Any) -> Any:
    """Return the C function that does a thread's part of a gather, compiled.

    Parameters
    ----------
    like : numpy unsigned integer
        As for `gather_compact`.
    """

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def part(data):
        gather = carray(data, (RESULTS,))
        thread = call_at(gather[THREAD_NUMBER])
        threads = call_at(gather[THREAD_COUNT])
        n_ids = gather[N_IDS]
        table = carray(numbers_at(gather[TABLE]), (SIZES,))
        ids = carray(numbers_at(gather[IDS]), (n_ids,))
        begin, end = n_ids * thread // threads, n_ids * (thread + 1) // threads
        results = carray(data, (RESULTS + threads,))
        results[RESULTS + thread] = gather_compact(table, like, ids, gather[TARGET], begin, end)

    return part
