"""Sums of bags of one id each whose rows are all resident, found and copied in one go."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, types

from .jit import njit
from .lookups import (
    BAGS_SIZES,
    FLOAT_BYTES,
    NOT_PLAIN,
    OFFSETS,
    RESIDENT,
    SLOT_OF,
    are_plain,
    copy_row_like,
    places_of_rows,
)
from .memory import (
    address_of,
    call_at,
    load_signed,
    load_signed_32,
    numbers_at,
    prefetch_line,
    prefetch_lines,
    store_signed,
)

# Resident rows are copied so many at a time, fewer where they are long.
COPY_BATCH = 16
COPY_BATCH_BYTES = 16384


@njit(nogil=True, cache=True)
def copy_batch(found, places, row_bytes, target, begin, end, float_bytes):
    """Copy rows begin..end to their places behind `target`, and add 0 to their floats.

    The address of row n is at place ``n & places`` of `found`; floats have 4 or 8 bytes.
    """
    if float_bytes == 4:
        for n in range(begin, end):
            start = load_signed(found + 8 * (n & places))
            copy_row_like(np.float32(0), target + n * row_bytes, start, row_bytes, 4)
    else:
        for n in range(begin, end):
            start = load_signed(found + 8 * (n & places))
            copy_row_like(np.float64(0), target + n * row_bytes, start, row_bytes, 8)


@njit(nogil=True, cache=True)
def copy_resident(ids, bags, row_bytes, n_rows, target, begin, end):
    """Sum bags of one id each, n = begin..end, whose rows are all resident.

    `bags` is the address of BAGS_SIZES numbers, `target` that of the first of all sums. Returns 0,
    a negative number where a row is not resident, or NOT_PLAIN when `are_plain` does not hold; in
    these cases some sums may have been written.
    """
    if not are_plain(ids, load_signed(bags + 8 * OFFSETS), n_rows, begin, end):
        return np.int64(NOT_PLAIN)
    slot_of = load_signed(bags + 8 * SLOT_OF)
    resident = load_signed(bags + 8 * RESIDENT)
    float_bytes = load_signed(bags + 8 * FLOAT_BYTES)
    batch = np.int64(COPY_BATCH)
    while batch > 2 and batch * row_bytes > COPY_BATCH_BYTES:
        batch >>= 1
    found = places_of_rows()
    places = 2 * batch - 1
    slots = np.int64(0)
    # Entries of the map are asked for, then the rows, then these are copied. A batch takes each
    # step while the one before it takes the next.
    for first in range(begin - 2 * batch, end, batch):
        second, third = first + batch, first + 2 * batch
        for n in range(max(begin, third), min(third + batch, end)):
            prefetch_line(slot_of + 4 * ids[n])
        for n in range(max(begin, second), min(third, end)):
            slot = load_signed_32(slot_of + 4 * ids[n])
            slots |= slot
            row = resident + slot * row_bytes
            store_signed(found + 8 * (n & places), row)
            prefetch_lines(row, row_bytes)
        if slots < 0:
            return slots
        start, stop = max(begin, first), min(second, end)
        copy_batch(found, places, row_bytes, target, start, stop, float_bytes)
    return np.int64(0)


# What a thread of a team reads of `copy_resident`, int64 each, by its place; behind it, for each
# thread, goes what that returns.
COPY_THREAD_NUMBER = 0  # addresses of C functions, see team.Team
COPY_THREAD_COUNT = 1
COPY_IDS = 2
COPY_N_IDS = 3
COPY_ROW_BYTES = 4
COPY_N_ROWS = 5
COPY_TARGET = 6
COPY_BAGS = 7  # BAGS_SIZES numbers
COPY_RESULTS = COPY_BAGS + BAGS_SIZES


def part_of_copy() -> Any:
    """Return the C function that does a thread's part of `copy_resident`, compiled."""

    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def part(data):
        copy = carray(data, (COPY_RESULTS,))
        thread = call_at(copy[COPY_THREAD_NUMBER])
        threads = call_at(copy[COPY_THREAD_COUNT])
        n_ids = copy[COPY_N_IDS]
        ids = carray(numbers_at(copy[COPY_IDS]), (n_ids,))
        begin, end = n_ids * thread // threads, n_ids * (thread + 1) // threads
        results = carray(data, (COPY_RESULTS + threads,))
        bags = address_of(copy) + 8 * COPY_BAGS
        results[COPY_RESULTS + thread] = copy_resident(
            ids, bags, copy[COPY_ROW_BYTES], copy[COPY_N_ROWS], copy[COPY_TARGET], begin, end
        )

    return part
