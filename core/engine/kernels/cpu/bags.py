"""Bags of rows, pooled as kernels/cuda/bags.cu does; see there.

What a kernel reports in the mailbox these functions return.
"""

from __future__ import annotations

from .jit import njit

MODE_SUM, MODE_MEAN, MODE_MAX = 0, 1, 2  # torch's numbers


@njit(nogil=True, cache=True)
def sound_offset(before, offset, b, entries, n, last_is_end):
    """Return whether an offset is what it can be after the one before it."""
    if b == 0 and offset != 0:
        return False
    if last_is_end and b == entries - 1 and offset != n:
        return False
    return before <= offset and offset <= n


@njit(nogil=True, cache=True)
def pool_bags(matrix, index, padding, offsets, last_is_end, mode, out):
    """Write the sum, the mean or the largest values of the rows of each bag.

    Return the first bag whose offsets are not sound and the first position of a bad id, -1 each
    where there is none.
    """
    n_rows, dim = matrix.shape
    n, entries = index.shape[0], offsets.shape[0]
    bad_bag, bad_id = -1, -1
    if last_is_end and entries == 1 and offsets[0] != n:
        bad_bag = 0
    for bag in range(out.shape[0]):
        begin, end = offsets[bag], n
        sound = sound_offset(0, begin, bag, entries, n, last_is_end)
        if bag + 1 < entries:
            end = offsets[bag + 1]
            sound = sound and sound_offset(begin, end, bag + 1, entries, n, last_is_end)
        if not sound:
            bad_bag = bag if bad_bag < 0 else bad_bag
            end = begin
        for c in range(dim):
            out[bag, c] = 0
        count = 0
        for j in range(begin, end):
            row = index[j]
            if row == padding:
                continue
            if row < 0 or row >= n_rows:
                bad_id = j if bad_id < 0 else bad_id
                continue
            for c in range(dim):
                x = matrix[row, c]
                if mode != MODE_MAX:
                    out[bag, c] += x
                elif count == 0 or x > out[bag, c]:
                    out[bag, c] = x
            count += 1
        if mode == MODE_MEAN and count:
            for c in range(dim):
                out[bag, c] /= matrix.dtype.type(count)
    return bad_bag, bad_id


@njit(nogil=True, cache=True)
def sound_offsets(offsets, n, last_is_end, out):
    """Copy offsets, or where they are not sound give each bag but the last one no id.

    Return the position of the first that is bad, or -1.
    """
    entries, bad = offsets.shape[0], -1
    for b in range(entries):
        before = offsets[b - 1] if b else 0
        out[b] = offsets[b]
        if bad < 0 and not sound_offset(before, offsets[b], b, entries, n, last_is_end):
            bad = b
    if bad >= 0:
        for b in range(entries):
            out[b] = n if last_is_end and b == entries - 1 else 0
    return bad
