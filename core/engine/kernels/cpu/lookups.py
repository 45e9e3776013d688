"""Rows of a compact table by id, found and decoded in one go.

What `gather.find_rows` and `gather.decode_fields` do in two steps, for the most usual table:
compact, with a field (see constants.Field), no cache. `prepared.PreparedTable` makes what is read
here. Few arguments of few types keep the cost of a call low: the table comes as an array of
addresses and sizes, int64 each, by their place below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic, overload

from .bytefields import VALUES_BYTES, decode_byte_row
from .fields import NUMBERS, SPARE_BYTES, decode_field_row
from .groups import words_before_8, words_before_16
from .jit import njit
from .memory import (
    add_zero_1,
    add_zero_16,
    address_of,
    call_at,
    copy_between,
    load_8,
    load_16,
    load_32,
    load_signed,
    load_signed_32,
    numbers_at,
    prefetch_line,
    prefetch_lines,
    stack_memory,
    store_signed,
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

#: Of few rows, some steps have a handful of rows each: where their loops end is what a processor
#: cannot foresee, and costs as much as a row.
MAX_BATCH = 128
DAMAGED = -1

# What a lookup of bags of one id each reads in addition to the table, int64 each. A resident
# row is taken from the cache, and 0 is added to all floats, since a sum begins with it.
OFFSETS = 0  # address of int64, where bags begin
SLOT_OF = 1  # address of int32 for each row: its slot, negative for none
RESIDENT = 2  # address of the rows in the slots
FLOAT_BYTES = 3  # 4 or 8
RESIDENT_BITS = 4  # address of a bit for each row, set where it has a slot; 0: no such bits
BAGS_SIZES = 5

NOT_PLAIN = -(1 << 62)


def _copier_adding_zero(count: int) -> Any:
    """Return the function for so many floats."""

    @intrinsic  # type: ignore[untyped-decorator]
    def copy_adding_zero(typing_context: Any, like: Any, target: Any, source: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.VectorType(args[0].type, count)
            zeros = ir.Constant(kind, [0.0] * count)
            source, target = (builder.inttoptr(at, kind.as_pointer()) for at in (args[2], args[1]))
            builder.store(builder.fadd(builder.load(source, align=4), zeros), target, align=4)
            return context.get_dummy_value()

        return types.void(like, types.int64, types.int64), build

    return copy_adding_zero


# Each copies the floats at an address to another, and adds 0 to them; `like` is as in `add_zero_1`.
copy_adding_zero_1 = _copier_adding_zero(1)
copy_adding_zero_16 = _copier_adding_zero(16)

places_of_rows = stack_memory(16 * 2 * MAX_BATCH)
rows_by_source = stack_memory(8 * 6 * MAX_BATCH)
spare_group = stack_memory(SPARE_BYTES)


@njit(nogil=True, cache=True, forceinline=True)
def length_of(lengths, length_bytes, row):
    """Return the length of a row."""
    if length_bytes == 1:
        return load_8(lengths + row)
    if length_bytes == 2:
        return load_16(lengths + 2 * row)
    return load_32(lengths + 4 * row)


@njit(nogil=True, cache=True)
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
            if place < 0:  # of a damaged base; and with no such test LLVM writes much more code
                return np.int64(0), np.int64(DAMAGED)
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
def find_short_row(bases, lengths, words, limit, row_words, row):
    """Do what `find_row` does for a row of a whole block whose lengths are bytes; none has moved.

    `bases`, `lengths` and `words` are addresses, `limit` is the number of words.
    """
    words_of = load_8(lengths + row)
    place = load_signed(bases + 8 * (row >> 5))
    place += words_before_8(lengths + (row & ~31), row & 31, row_words)
    # As in `find_row`.
    size = words_of if words_of > 0 else row_words
    if place < 0 or place > limit - size or words_of >= row_words:
        words_of = np.int64(DAMAGED)
    return words + 4 * place, words_of


@njit(nogil=True, cache=True, forceinline=True)
def row_at(ids, n, n_rows):
    """Return the row that an id stands for."""
    row = np.int64(ids[np.uint64(n)])  # unsigned, or Numba tests for a place before the end
    return row + n_rows if row < 0 else row


# A batch goes in three steps, each a function of its own: one that did all of them would keep most
# of what it needs on the stack.


@njit(nogil=True, cache=True)
def split_by_bits(ids, begin, end, bits, cached, others):
    """List those of rows ``ids[begin:end]`` that have a slot; return how many there are.

    Their numbers n go to the addresses from `cached` on, int64 each, and those of the others to
    `others`. `bits` is an address, as RESIDENT_BITS says, or 0: no row has a slot.
    """
    hits = np.int64(0)
    if bits == 0:
        for n in range(begin, end):
            store_signed(others + 8 * (n - begin), n)
        return hits
    # With no branch: which rows are resident is what a processor cannot foresee.
    for n in range(begin, end):
        row = np.int64(ids[np.uint64(n)])
        store_signed(cached + 8 * hits, n)
        store_signed(others + 8 * (n - begin - hits), n)
        hits += (load_8(bits + (row >> 3)) >> (row & 7)) & 1
    return hits


@njit(nogil=True, cache=True)
def split_by_slots(ids, begin, end, slots, cached, others):
    """Do what `split_by_bits` does with the slots themselves."""
    hits = np.int64(0)
    for n in range(begin, end):
        store_signed(cached + 8 * hits, n)
        store_signed(others + 8 * (n - begin - hits), n)
        hits += 1 + (load_signed_32(slots + 4 * np.int64(ids[np.uint64(n)])) >> 31)
    return hits


@njit(nogil=True, cache=True)
def ask_slots(ids, numbers, count, slots):
    """Prefetch the slots of rows whose numbers n are at an address."""
    for k in range(count):
        n = load_signed(numbers + 8 * k)
        prefetch_line(slots + 4 * np.int64(ids[np.uint64(n)]))


@njit(nogil=True, cache=True)
def ask_lengths(table, ids, numbers, count):
    """Prefetch the lengths and bases of rows whose numbers n are at an address."""
    n_rows = load_signed(table + 8 * N_ROWS)
    bases = load_signed(table + 8 * BASES)
    lengths = load_signed(table + 8 * LENGTHS)
    length_bytes = load_signed(table + 8 * LENGTH_BYTES)
    row_clusters = load_signed(table + 8 * ROW_CLUSTERS)
    # Where there are none, the lengths' start is asked for: a branch would cost more.
    clusters = row_clusters if row_clusters != 0 else lengths
    cluster_bytes = 1 if row_clusters != 0 else 0
    for k in range(count):
        row = row_at(ids, load_signed(numbers + 8 * k), n_rows)
        prefetch_line(bases + 8 * (row >> 5))
        prefetch_line(lengths + length_bytes * (row & ~31))
        prefetch_line(lengths + length_bytes * (row | 31))
        prefetch_line(clusters + cluster_bytes * row)


@njit(nogil=True, cache=True)
def find_resident(ids, numbers, count, slots, resident, row_bytes, found, places):
    """Write the addresses of resident rows whose numbers n are at an address.

    That of row n goes to place ``n & places`` of `found`, as in `ask_words`.
    """
    for k in range(count):
        n = load_signed(numbers + 8 * k)
        slot = load_signed_32(slots + 4 * np.int64(ids[np.uint64(n)]))
        store_signed(found + 16 * (n & places), resident + slot * row_bytes)


@njit(nogil=True, cache=True)
def ask_words(table, ids, numbers, count, found, places):
    """Find the rows whose numbers n are at an address, and prefetch their words.

    For row n address and words, as `find_row` returns them, go to place ``n & places`` of `found`.
    """
    n_rows = load_signed(table + 8 * N_ROWS)
    row_words = load_signed(table + 8 * ROW_WORDS)
    bases = load_signed(table + 8 * BASES)
    lengths = load_signed(table + 8 * LENGTHS)
    words = load_signed(table + 8 * WORDS)
    limit = load_signed(table + 8 * WORDS_LIMIT)
    # Most tables are of short rows, none of which has moved, and most rows stand in a whole block.
    short = load_signed(table + 8 * LENGTH_BYTES) == 1 and load_signed(table + 8 * MOVED) == 0
    whole = (n_rows & ~31) if short else np.int64(0)
    for k in range(count):
        n = load_signed(numbers + 8 * k)
        row = row_at(ids, n, n_rows)
        if 0 <= row < whole:
            start, words_of = find_short_row(bases, lengths, words, limit, row_words, row)
        else:
            start, words_of = find_row(table, row)
        to = found + 16 * (n & places)
        store_signed(to, start)
        store_signed(to + 8, words_of)
        if words_of >= 0:
            prefetch_lines(start, 4 * (words_of if words_of > 0 else row_words))


@njit(nogil=True, cache=True, forceinline=True)
def add_zeros_like(like, target, end, float_bytes):
    """Add 0 to all floats from one address to another; `like` is any number of their type."""
    while target + 16 * float_bytes <= end:
        add_zero_16(like, target)
        target += 16 * float_bytes
    while target < end:
        add_zero_1(like, target)
        target += float_bytes


@njit(nogil=True, cache=True, forceinline=True)
def add_zeros(target, end, float_bytes):
    """Add 0 to all floats of 4 or 8 bytes from one address to another."""
    if float_bytes == 4:
        add_zeros_like(np.float32(0), target, end, 4)
    else:
        add_zeros_like(np.float64(0), target, end, 8)


@njit(nogil=True, cache=True, forceinline=True)
def copy_row_like(like, to, start, row_bytes, float_bytes):
    """Copy a row from one address to another, adding 0 to floats of the type of `like`."""
    stop = to + row_bytes
    while to + 16 * float_bytes <= stop:
        copy_adding_zero_16(like, to, start)
        to += 16 * float_bytes
        start += 16 * float_bytes
    while to < stop:
        copy_adding_zero_1(like, to, start)
        to += float_bytes
        start += float_bytes


@njit(nogil=True, cache=True, forceinline=True)
def copy_row(to, start, row_bytes, float_bytes):
    """Copy a row, and add 0 to its floats of 4 or 8 bytes unless `float_bytes` is 0."""
    if float_bytes == 4:
        copy_row_like(np.float32(0), to, start, row_bytes, 4)
    elif float_bytes == 8:
        copy_row_like(np.float64(0), to, start, row_bytes, 8)
    else:
        copy_between(to, start, row_bytes)


def decode_batch(like, table, ids, numbers, count, found, places, spare, target, float_bytes):
    """Decode rows that `ask_words` has found; return their words, or -1 - n for a damaged one.

    The rows' numbers n are at the address `numbers`, int64 each. Unless `float_bytes` is 0, 0 is
    added to floats of so many bytes. For compiled code alone. Signed `like` decodes rows that
    bytefields.py serves, unsigned those with any field.
    """
    raise NotImplementedError


@overload(decode_batch, jit_options={"nogil": True})
def _decode_batch(like, table, ids, numbers, count, found, places, spare, target, float_bytes):
    return decode_batch_of_bytes if like.signed else decode_batch_of_fields


def decode_batch_of_bytes(
    like, table, ids, numbers, count, found, places, spare, target, float_bytes
):
    """Do what `decode_batch` says with `decode_byte_row`."""
    row_bytes = load_signed(table + 8 * ROW_BYTES)
    row_words = load_signed(table + 8 * ROW_WORDS)
    fields = load_signed(table + 8 * FIELDS)
    values = load_signed(table + 8 * VALUES)
    code_bits = load_signed(table + 8 * CODE_BITS)
    chunks = load_signed(table + 8 * CHUNKS)
    total = np.int64(0)
    for k in range(count):
        n = load_signed(numbers + 8 * k)
        place = found + 16 * (n & places)
        start = load_signed(place)
        words_of = load_signed(place + 8)
        to = target + n * row_bytes
        if words_of == 0:
            copy_row(to, start, row_bytes, float_bytes)
            total += row_words
            continue
        cluster = cluster_at(table, ids, n)
        if words_of < 0 or cluster < 0:
            return -1 - n
        field = fields + 8 * NUMBERS * cluster
        value = values + VALUES_BYTES * cluster
        need = decode_byte_row(like, start, words_of, field, value, code_bits, chunks, to)
        if need < 0:
            return -1 - n
        if float_bytes != 0:
            add_zeros(to, to + row_bytes, float_bytes)
        total += need
    return total


def decode_batch_of_fields(
    like, table, ids, numbers, count, found, places, spare, target, float_bytes
):
    """Do what `decode_batch` says with `decode_field_row`."""
    row_bytes = load_signed(table + 8 * ROW_BYTES)
    row_words = load_signed(table + 8 * ROW_WORDS)
    cluster_values_bytes = load_signed(table + 8 * CLUSTER_VALUES_BYTES)
    group_values_bytes = load_signed(table + 8 * GROUP_VALUES_BYTES)
    each = load_signed(table + 8 * EACH) != 0
    code_bits = load_signed(table + 8 * CODE_BITS)
    grouped = load_signed(table + 8 * GROUPED) != 0
    chunks = load_signed(table + 8 * CHUNKS)
    total = np.int64(0)
    for k in range(count):
        n = load_signed(numbers + 8 * k)
        place = found + 16 * (n & places)
        start = load_signed(place)
        words_of = load_signed(place + 8)
        to = target + n * row_bytes
        if words_of == 0:
            copy_row(to, start, row_bytes, float_bytes)
            total += row_words
            continue
        cluster = cluster_at(table, ids, n)
        if words_of < 0 or cluster < 0:
            return -1 - n
        need = decode_field_row(
            like,
            start,
            words_of,
            load_signed(table + 8 * FIELDS) + 8 * NUMBERS * cluster,
            load_signed(table + 8 * VALUES) + cluster_values_bytes * cluster,
            group_values_bytes,
            each,
            code_bits,
            grouped,
            chunks,
            spare,
            to,
        )
        if need < 0:
            return -1 - n
        if float_bytes != 0:
            add_zeros(to, to + row_bytes, float_bytes)
        total += need
    return total


@njit(nogil=True, cache=True, forceinline=True)
def cluster_at(table, ids, n):
    """Return the cluster of the row that ``ids[n]`` stands for, or DAMAGED."""
    row_clusters = load_signed(table + 8 * ROW_CLUSTERS)
    if row_clusters == 0:
        return np.int64(0)
    cluster = load_8(row_clusters + row_at(ids, n, load_signed(table + 8 * N_ROWS)))
    return cluster if cluster < load_signed(table + 8 * CLUSTERS) else np.int64(DAMAGED)


@njit(nogil=True, cache=True)
def are_plain(ids, offsets, n_rows, begin, end):
    """Return whether ids are in range, none negative, and bag n starts at id n, n = begin..end."""
    # Bits are gathered, with no branch, so that the loops run on vectors.
    wrong = np.int64(0)
    differs = np.int64(0)
    bags = carray(numbers_at(offsets), (end,))
    for n in range(begin, end):
        wrong |= np.int64(ids[n]) | (n_rows - 1 - np.int64(ids[n]))
        differs |= bags[n] ^ n
    return wrong >= 0 and differs == 0


@njit(nogil=True, cache=True)
def gather_compact(numbers, like, ids, target, bags, begin, end):
    """Gather rows ``ids[begin:end]`` to an address, row 0 of them all.

    `numbers` are SIZES numbers, `like` is any number as wide as a chunk, see `decode_row`, `bags`
    the address of BAGS_SIZES numbers, 0 for rows as they are.

    Returns the words of the rows, -1 - n when the row of ``ids[n]`` is damaged, or NOT_PLAIN when
    `are_plain` does not hold; and how many rows were not resident.
    """
    table = address_of(numbers)
    row_bytes = load_signed(table + 8 * ROW_BYTES)
    batch = load_signed(table + 8 * BATCH)
    slots = np.int64(0)
    bits = np.int64(0)
    resident = np.int64(0)
    float_bytes = np.int64(0)
    if bags != 0:
        offsets = load_signed(bags + 8 * OFFSETS)
        if not are_plain(ids, offsets, load_signed(table + 8 * N_ROWS), begin, end):
            return np.int64(NOT_PLAIN), np.int64(0)
        slots = load_signed(bags + 8 * SLOT_OF)
        bits = load_signed(bags + 8 * RESIDENT_BITS)
        resident = load_signed(bags + 8 * RESIDENT)
        float_bytes = load_signed(bags + 8 * FLOAT_BYTES)
    # Slots are read to tell which rows have one, which takes a step more.
    late = slots != 0 and bits == 0
    found = places_of_rows()
    spare = spare_group()
    places = 2 * batch - 1
    # The numbers of the rows of three batches, resident ones and then others.
    now = rows_by_source()
    after = now + 8 * 2 * MAX_BATCH
    later = after + 8 * 2 * MAX_BATCH
    others = 8 * MAX_BATCH
    total = np.int64(0)
    hits = np.int64(0)
    cached = np.int64(0)
    next_cached = np.int64(0)
    # The lengths of a batch are asked for, then its words, then it is decoded. A batch takes each
    # step while the one before it takes the next.
    for first in range(begin - 2 * batch, end, batch):
        second, third = first + batch, first + 2 * batch
        start, stop = max(begin, third), max(max(begin, third), min(third + batch, end))
        later_cached = split_by_bits(ids, start, stop, bits, later, later + others)
        ask_lengths(table, ids, later + others, stop - start - later_cached)
        if late:
            ask_slots(ids, later + others, stop - start, slots)
        else:
            ask_slots(ids, later, later_cached, slots)
        start, stop = max(begin, second), max(max(begin, second), min(third, end))
        if late:
            next_cached = split_by_slots(ids, start, stop, slots, after, after + others)
        find_resident(ids, after, next_cached, slots, resident, row_bytes, found, places)
        copy_listed(now, cached, after, next_cached, found, places, row_bytes, target, float_bytes)
        ask_words(table, ids, after + others, stop - start - next_cached, found, places)
        count = max(0, min(second, end) - max(begin, first)) - cached
        words = decode_batch(
            like, table, ids, now + others, count, found, places, spare, target, float_bytes
        )
        if words < 0:
            return words, np.int64(0)
        total += words
        hits += cached
        now, after, later = after, later, now
        cached, next_cached = next_cached, later_cached
    return total, end - begin - hits


@njit(nogil=True, cache=True, forceinline=True)
def copy_listed_like(like, now, count, after, asked, found, places, row_bytes, target, float_bytes):
    """Do what `copy_listed` does; `like` is any number of the floats' type."""
    for k in range(count):
        if k < asked:
            n = load_signed(after + 8 * k)
            prefetch_lines(load_signed(found + 16 * (n & places)), row_bytes)
        n = load_signed(now + 8 * k)
        start = load_signed(found + 16 * (n & places))
        copy_row_like(like, target + n * row_bytes, start, row_bytes, float_bytes)


@njit(nogil=True, cache=True)
def copy_listed(now, count, after, asked, found, places, row_bytes, target, float_bytes):
    """Copy resident rows and add 0 to their floats; meanwhile prefetch those of the next batch.

    The numbers of `count` rows are at the address `now`, those of the next ones at `after`.
    """
    if float_bytes == 4:
        copy_listed_like(
            np.float32(0), now, count, after, asked, found, places, row_bytes, target, 4
        )
    elif float_bytes == 8:
        copy_listed_like(
            np.float64(0), now, count, after, asked, found, places, row_bytes, target, 8
        )
    for k in range(count, asked):
        n = load_signed(after + 8 * k)
        prefetch_lines(load_signed(found + 16 * (n & places)), row_bytes)


# What a thread of a team reads of a gather, int64 each, by its place; behind it, for each thread,
# go the two numbers that `gather_compact` returns.
THREAD_NUMBER = 0  # addresses of C functions, see team.Team
THREAD_COUNT = 1
TABLE = 2
IDS = 3
N_IDS = 4
TARGET = 5
BAGS = 6
RESULTS = 7


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
        results = carray(data, (RESULTS + 2 * threads,))
        target, bags = gather[TARGET], gather[BAGS]
        words, missing = gather_compact(table, like, ids, target, bags, begin, end)
        results[RESULTS + 2 * thread] = words
        results[RESULTS + 2 * thread + 1] = missing

    return part
