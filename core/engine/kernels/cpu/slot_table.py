"""The slot table of a cache: which rows it holds, and which are evicted for others.

Arrays: ``slot_of`` int32 ``[N]``, the slot of each row or -1; ``keys`` int64 ``[C]``, the priority
of the row in each slot, which never falls while it is cached; ``stamps`` int64 ``[C]``, the
number of the last batch that used it; ``pinned`` bool ``[C]``. ``heap`` int32 ``[C]`` and
``heap_keys`` int64 ``[C]`` are a binary heap of the slots that may be evicted, the lowest key
first. A key there may be older than that of the slot: whoever takes such a slot from the top puts
it back with its current key, so that using a row costs nothing in the heap.
"""

from __future__ import annotations

import numpy as np

from ..format import NO_SLOT
from .jit import njit
from .memory import prefetch

# How a lookup changes the key of a row.
KEEP = 0
COUNT_UP = 1  # how often it was looked up
LAST_USE = 2  # when it was looked up

AHEAD = 16


@njit(nogil=True, cache=True)
def find_slots(ids, slot_of, slots):
    """Write the slots of rows; return the first bad position or -1, and how many have no slot."""
    count = ids.shape[0]
    n_rows = slot_of.shape[0]
    missing = 0
    for n in range(count):
        if n + AHEAD < count:
            prefetch(slot_of, ids[n + AHEAD] * 4)
        row = ids[n]
        if row < 0 or row >= n_rows:
            return n, missing
        slot = slot_of[row]
        slots[n] = slot
        missing += slot < 0
    return -1, missing


@njit(nogil=True, cache=True)
def find_bags(ids, offsets, include_last, slot_of, slots):
    """Write the slots of rows if ids and offsets are right.

    Returns how many rows have no slot, -1 where something is wrong.
    """
    count = ids.shape[0]
    n_rows = slot_of.shape[0]
    bags = offsets.shape[0]
    if bags > 0 and (offsets[0] != 0 or offsets[bags - 1] > count):
        return -1
    if include_last and (bags == 0 or offsets[bags - 1] != count):
        return -1
    # Sign bits are gathered, with no branch, so that the loops run on vectors.
    wrong = np.int64(0)
    for n in range(1, bags):
        wrong |= offsets[n] - offsets[n - 1]
    for n in range(count):
        wrong |= ids[n] | (n_rows - 1 - ids[n])
    if wrong < 0:
        return -1
    missing = np.int64(0)
    for n in range(count):
        slot = np.int64(slot_of[ids[n]])
        slots[n] = slot
        missing += slot < 0
    return missing


@njit(nogil=True, cache=True)
def find_outside(ids, n_rows):
    """Return the first position of an id out of range, or -1."""
    for n in range(ids.shape[0]):
        if ids[n] < 0 or ids[n] >= n_rows:
            return n
    return -1


@njit(nogil=True, cache=True)
def look_up(ids, slot_of, keys, stamps, stamp, how, slots, touched, rank, missing, missing_counts):
    """Find the slots of rows in range and update their stamps and keys.

    ``slots[n]`` becomes the slot, or ``-(k + 2)`` for the k-th different row without one, which
    stands in ``missing[k]`` and is looked up ``missing_counts[k]`` times; ``slot_of`` is marked the
    same way until `unmark`. ``touched`` takes the different slots, ``rank`` their place in it.
    Returns how many are touched and missing.
    """
    count = ids.shape[0]
    n_touched = 0
    n_missing = 0
    for n in range(count):
        if n + AHEAD < count:
            prefetch(slot_of, ids[n + AHEAD] * 4)
        row = ids[n]
        slot = slot_of[row]
        if slot >= 0:
            if stamps[slot] != stamp:
                stamps[slot] = stamp
                touched[n_touched] = slot
                rank[slot] = n_touched
                n_touched += 1
                if how == LAST_USE:
                    keys[slot] = stamp
            if how == COUNT_UP:
                keys[slot] += 1
        elif slot == NO_SLOT:
            slot = -(n_missing + 2)
            slot_of[row] = slot
            missing[n_missing] = row
            missing_counts[n_missing] = 1
            n_missing += 1
        else:
            missing_counts[-slot - 2] += 1
        slots[n] = slot
    return n_touched, n_missing


@njit(nogil=True, cache=True)
def unmark(slot_of, missing):
    """Remove the marks of `look_up`."""
    for k in range(missing.shape[0]):
        slot_of[missing[k]] = NO_SLOT


@njit(nogil=True, cache=True)
def resolve(slots, places):
    """Replace ``-(k + 2)`` by ``places[k]``."""
    for n in range(slots.shape[0]):
        if slots[n] < 0:
            slots[n] = places[-slots[n] - 2]


@njit(nogil=True, cache=True)
def compress_slots(slots, rank, n_missing):
    """Replace slots by numbers of rows: missing rows from 0, then those with a slot."""
    for n in range(slots.shape[0]):
        slot = slots[n]
        slots[n] = n_missing + rank[slot] if slot >= 0 else -slot - 2


@njit(nogil=True, cache=True)
def _sink(heap, heap_keys, size, at):
    slot, key = heap[at], heap_keys[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap_keys[child + 1] < heap_keys[child]:
            child += 1
        if heap_keys[child] >= key:
            break
        heap[at], heap_keys[at] = heap[child], heap_keys[child]
        at = child
    heap[at], heap_keys[at] = slot, key


@njit(nogil=True, cache=True)
def push(heap, heap_keys, size, slots, keys):
    """Put slots into the heap; return its new size."""
    for n in range(slots.shape[0]):
        slot = slots[n]
        key = keys[slot]
        at = size
        size += 1
        while at > 0:
            parent = (at - 1) >> 1
            if heap_keys[parent] <= key:
                break
            heap[at], heap_keys[at] = heap[parent], heap_keys[parent]
            at = parent
        heap[at], heap_keys[at] = slot, key
    return size


@njit(nogil=True, cache=True)
def take_least(heap, heap_keys, size, keys, stamps, stamp, pinned, count, taken, held):
    """Take the `count` slots of lowest key that neither are pinned nor used by batch `stamp`.

    Returns how many there were, in ``taken``, and the new size of the heap. With fewer than `count`
    the heap is as before.
    """
    found = 0
    n_held = 0
    while found < count and size > 0:
        slot = heap[0]
        if heap_keys[0] != keys[slot]:
            heap_keys[0] = keys[slot]
            _sink(heap, heap_keys, size, 0)
            continue
        size -= 1
        heap[0], heap_keys[0] = heap[size], heap_keys[size]
        if size > 0:
            _sink(heap, heap_keys, size, 0)
        if stamps[slot] == stamp or pinned[slot]:
            held[n_held] = slot
            n_held += 1
        else:
            taken[found] = slot
            found += 1
    size = push(heap, heap_keys, size, held[:n_held], keys)
    if found < count:
        size = push(heap, heap_keys, size, taken[:found], keys)
    return found, size
