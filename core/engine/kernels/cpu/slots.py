"""Slots of a cache for the rows of a batch, as kernels/cuda/slots.cu finds them; see there."""

from __future__ import annotations

import numpy as np

from ..format import NO_ROW, NO_SLOT
from .bags import sound_offsets
from .jit import njit
from .slot_table import COUNT_UP, LAST_USE

CLAIMED = NO_SLOT - 2


@njit(nogil=True, cache=True)
def claim_slots(
    ids,
    n_rows,
    slot_of,
    seen,
    number,
    wanted,
    counts,
    claims,
    changed,
    marked,
    mark,
    offsets,
    last_is_end,
    sound,
):
    """Write the rows of a batch that have no slot, mark slots as changed, and look at offsets."""
    for slot in marked:
        changed[slot] = mark
    claims[2] = sound_offsets(offsets, ids.shape[0], last_is_end, sound)
    for i in range(ids.shape[0]):
        row = min(max(ids[i], 0), n_rows - 1)
        if row != ids[i] and claims[1] < 0:
            claims[1] = i
        slot = slot_of[row]
        if slot >= 0:
            if seen[slot] != number:
                seen[slot] = number
                counts[0] += 1
        elif slot == NO_SLOT:
            k = claims[0]
            claims[0] = k + 1
            wanted[k] = row
            slot_of[row] = CLAIMED - k


@njit(nogil=True, cache=True)
def keep_slots(
    ids, n_rows, keys, seen, counting, number, slots, counts, offsets, last_is_end, sound
):
    """Write the slots of a batch whose rows are all resident.

    Return the positions of an id out of range and of the first offset that is not sound, or -1.
    """
    bad = -1
    for i in range(ids.shape[0]):
        row = min(max(ids[i], 0), n_rows - 1)
        slots[i] = row
        if row != ids[i]:
            bad = i
        if seen[row] != number:
            seen[row] = number
            counts[0] += 1
        if counting == COUNT_UP:
            keys[row] += 1
        elif counting == LAST_USE:
            keys[row] = number
    return bad, sound_offsets(offsets, ids.shape[0], last_is_end, sound)


@njit(nogil=True, cache=True)
def _steps_up_to(x, n_bins):
    if x < 1024:
        return x
    top = 10
    while x >> (top + 1):
        top += 1
    return min(1024 + (top - 10) * 32 + (x >> (top - 5) & 31), n_bins - 2)


@njit(nogil=True, cache=True)
def _bin_of(row, key, evict, number, n_rows, n_bins):
    if row < 0:
        return 0
    if evict == COUNT_UP:
        return 1 + _steps_up_to(key, n_bins)
    if evict == LAST_USE:
        return n_bins - 1 - _steps_up_to(number - key, n_bins)
    unused = n_rows - 1 + key
    return 1 + (unused if n_rows < n_bins else unused * (n_bins - 1) // n_rows)


@njit(nogil=True, cache=True)
def _may_leave(seen, pinned, oldest, slot):
    return seen[slot] < oldest and not (pinned.shape[0] and pinned[slot])


@njit(nogil=True, cache=True)
def count_slots(n_rows, row_in, keys, seen, pinned, evict, number, oldest, bins, claims):
    """Count the slots whose rows may leave, by what these are worth."""
    if claims[0] == 0:
        return
    for slot in range(row_in.shape[0]):
        if _may_leave(seen, pinned, oldest, slot):
            bins[_bin_of(row_in[slot], keys[slot], evict, number, n_rows, bins.shape[0])] += 1


@njit(nogil=True, cache=True)
def choose_slots(
    n_rows,
    row_in,
    keys,
    seen,
    since,
    changed,
    pinned,
    order,
    evict,
    number,
    oldest,
    bins,
    wanted,
    victims,
    leaving,
    counts,
    claims,
):
    """Take the slots of the rows that are worth least."""
    missing = claims[0]
    if missing == 0:
        return
    last_bin, before = 0, 0
    while last_bin < bins.shape[0] and before + bins[last_bin] < missing:
        before += bins[last_bin]
        last_bin += 1
    for slot in range(row_in.shape[0]):
        if not _may_leave(seen, pinned, oldest, slot):
            continue
        row = row_in[slot]
        bin = _bin_of(row, keys[slot], evict, number, n_rows, bins.shape[0])
        if bin > last_bin:
            continue
        if bin == last_bin:
            claims[3] += 1
            if claims[3] > missing - before:
                continue
        k = claims[4]
        claims[4] = k + 1
        writes = row >= 0 and changed[slot] != 0
        victims[k] = slot
        leaving[k] = row if writes else NO_ROW
        counts[2] += writes
        if evict == COUNT_UP:
            keys[slot] = 0
        elif evict == LAST_USE:
            keys[slot] = number
        else:
            keys[slot] = -(order[wanted[k]] if order.shape[0] else wanted[k])
        seen[slot] = number
        since[slot] = number


@njit(nogil=True, cache=True)
def give_slots(
    ids,
    n_rows,
    slot_of,
    row_in,
    keys,
    changed,
    counting,
    number,
    wanted,
    victims,
    leaving,
    slots,
    kept,
    counts,
    claims,
    next_claims,
    next_bins,
):
    """Write the slots of all rows of a batch; `kept` may be empty.

    Return the first positions of a bad id and of an offset that is not sound, or -1.
    """
    missing, taken = claims[0], claims[4]
    for i in range(ids.shape[0]):
        row = min(max(ids[i], 0), n_rows - 1)
        slot = slot_of[row]
        if slot < 0:
            k = CLAIMED - slot
            slot = victims[k] if 0 <= k < taken else 0
        slots[i] = slot
        if kept.shape[0]:
            kept[i] = slot
        if counting == COUNT_UP:
            keys[slot] += 1
        elif counting == LAST_USE:
            keys[slot] = number
    for k in range(taken, missing):
        slot_of[wanted[k]] = NO_SLOT
        wanted[k] = NO_ROW
    for k in range(taken):
        slot, gone = victims[k], row_in[victims[k]]
        if gone >= 0:
            slot_of[gone] = NO_SLOT
        row_in[slot] = wanted[k]
        changed[slot] = 0
        slot_of[wanted[k]] = slot
        wanted[k] = leaving[k] = NO_ROW
    next_bins[:] = 0
    counts[1] = missing
    bad, bad_offset = claims[1], claims[2]
    next_claims[:] = 0
    next_claims[1] = next_claims[2] = -1
    return bad, bad_offset


@njit(nogil=True, cache=True)
def exchange_rows(cached, out, incoming, by_position, slots, leaving, wanted, coming):
    """Exchange rows of one array, uint8 ``[slots, b]``, with uint8 ``[rows, b]``.

    Those that leave go to `out`, or nowhere if it has no rows; those that come are in `incoming`,
    which may be the same.
    """
    for k in range(coming[0]):
        coming[1] = 1
        slot = slots[k]
        if leaving[k] >= 0 and out.shape[0] > 0:
            row = k if by_position else leaving[k]
            for at in range(np.int64(cached.shape[1])):
                out[row, at] = cached[slot, at]
        if wanted[k] >= 0:
            row = k if by_position else wanted[k]
            for at in range(np.int64(cached.shape[1])):
                cached[slot, at] = incoming[row, at]
