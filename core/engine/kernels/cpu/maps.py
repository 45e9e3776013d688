"""Numba twins of map.cu: an open-addressing hash map from row ids to locations.

``entries`` is ``[buckets * BUCKET_ENTRIES, 2]`` int64, id and location, `buckets` a power of two;
an empty entry has the id NO_ID. An id is looked for from its own bucket on, around the end, until a
bucket with an empty entry shows that it is not there. Ids are never removed.
"""

from __future__ import annotations

import numpy as np

from ..format import BUCKET_ENTRIES, LINE_BYTES, NO_ID, NOT_CACHED
from .jit import njit
from .memory import prefetch

AHEAD = 16  # ids whose buckets are asked for before their turn


@njit(nogil=True, cache=True)
def mix(row_id):
    """Spread the bits of an id over 64 bits: the finalizer of splitmix64."""
    x = np.uint64(row_id)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@njit(nogil=True, cache=True)
def first_entry(row_id, buckets):
    """Return the first entry of the bucket that an id belongs to."""
    return np.int64(mix(row_id) & np.uint64(buckets - 1)) * BUCKET_ENTRIES


@njit(nogil=True, cache=True)
def prefetch_bucket(entries, row_id):
    """Ask for the bucket of an id; `entries` is not empty."""
    buckets = entries.shape[0] // BUCKET_ENTRIES
    prefetch(entries, first_entry(row_id, buckets) * (LINE_BYTES // BUCKET_ENTRIES))


@njit(nogil=True, cache=True)
def find_entry(entries, row_id):
    """Return the entry with an id, else the first empty one on its way, else -1: the map is full.

    `row_id` is not negative.
    """
    buckets = entries.shape[0] // BUCKET_ENTRIES
    if buckets == 0:
        return np.int64(-1)
    entry = first_entry(row_id, buckets)
    for _ in range(buckets):
        empty = np.int64(-1)
        for e in range(entry, entry + BUCKET_ENTRIES):
            if entries[e, 0] == row_id:
                return e
            if entries[e, 0] == NO_ID and empty < 0:
                empty = e
        if empty >= 0:
            return empty
        entry += BUCKET_ENTRIES
        if entry == buckets * BUCKET_ENTRIES:
            entry = np.int64(0)
    return np.int64(-1)


@njit(nogil=True, cache=True)
def find_location(entries, row_id):
    """Return the location of an id, or NOT_CACHED; ids below 0 are never there."""
    if row_id < 0:
        return np.int64(NOT_CACHED)
    entry = find_entry(entries, row_id)
    if entry < 0 or entries[entry, 0] != row_id:
        return np.int64(NOT_CACHED)
    return entries[entry, 1]


@njit(nogil=True, cache=True)
def map_insert(entries, ids, locations):
    """Insert ids, the later of two equal ones overwriting the earlier; return how many failed."""
    failed = 0
    n = ids.shape[0]
    for i in range(n):
        if i + AHEAD < n and entries.shape[0] > 0:
            prefetch_bucket(entries, ids[i + AHEAD])
        row_id = np.int64(ids[i])
        entry = find_entry(entries, row_id) if row_id >= 0 else np.int64(-1)
        if entry < 0:
            failed += 1
        else:
            entries[entry, 0] = row_id
            entries[entry, 1] = locations[i]
    return failed


@njit(nogil=True, cache=True)
def map_find(entries, ids, n_rows, locations, begin, end):
    """Write the locations of ``ids[begin:end]``, NOT_CACHED where one is not in the map.

    `n_rows` is added to negative ids.
    """
    for i in range(begin, end):
        if i + AHEAD < end and entries.shape[0] > 0:
            ahead = np.int64(ids[i + AHEAD])
            prefetch_bucket(entries, ahead + n_rows if ahead < 0 else ahead)
        row_id = np.int64(ids[i])
        locations[i] = find_location(entries, row_id + n_rows if row_id < 0 else row_id)
