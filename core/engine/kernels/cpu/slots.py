"""Slots of a cache for the rows of a batch, as kernels/cuda/slots.cu finds them; see there."""

from __future__ import annotations

from numba import njit

from ..format import NO_SLOT

CLAIMED = NO_SLOT - 2


@njit(nogil=True, cache=True)
def claim_slots(ids, n_rows, slot_of, wanted, claims):
    """Write the rows of a batch that have no slot."""
    for i in range(ids.shape[0]):
        row = min(max(ids[i], 0), n_rows - 1)
        if row != ids[i] and claims[1] < 0:
            claims[1] = i
        if slot_of.shape[0] and slot_of[row] == NO_SLOT:
            k = claims[0]
            claims[0] = k + 1
            wanted[k] = row
            slot_of[row] = CLAIMED - k


@njit(nogil=True, cache=True)
def give_slots(
    ids, n_rows, slot_of, first, slots, kept, seen, number, uses, adds, counts, miss_count, claims
):
    """Write the slots of all rows of a batch; return the first position of a bad id, or -1."""
    different = 0
    for i in range(ids.shape[0]):
        row = min(max(ids[i], 0), n_rows - 1)
        slot = row
        if slot_of.shape[0]:
            slot = slot_of[row]
            if slot < 0:
                slot = slot_of[row] = first + (CLAIMED - slot)
        slots[i] = kept[i] = slot
        if seen[slot] != number:
            seen[slot] = number
            different += 1
        if uses.shape[0]:
            uses[slot] = uses[slot] + 1 if adds else number
    missed, bad = claims[0], claims[1]
    claims[0], claims[1] = 0, -1
    counts[0] += different - missed
    counts[1] = miss_count[0] = missed
    return bad
