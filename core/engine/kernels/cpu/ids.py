"""Ids by where their rows lie, and rows of tables back to back, as kernels/cuda/ids.cu does."""

from __future__ import annotations

from .jit import njit


@njit(nogil=True, cache=True)
def reset_order(bins, first_bad):
    """Empty the bins and forget what was found: int32 ``[2 * n_bins]``, int64 ``[1]``."""
    bins[:] = 0
    first_bad[0] = -1


@njit(nogil=True, cache=True)
def count_ids(ids, lowest, n_rows, shift, bins, first_bad):
    """Find the first id out of range and count the others by bin."""
    for i in range(ids.shape[0]):
        row = ids[i]
        if row < lowest or row >= n_rows:
            if first_bad[0] < 0:
                first_bad[0] = i
            continue
        if row < 0:
            row += n_rows
        bins[row >> shift] += 1


@njit(nogil=True, cache=True)
def order_ids(ids, n_rows, shift, bins, first_bad, order):
    """Write the positions of all ids to `order`, bin after bin; nothing where one is bad."""
    if first_bad[0] != -1:
        return
    n_bins = bins.shape[0] // 2
    start = 0
    for b in range(n_bins):  # the second half: where the next id of each bin goes
        bins[n_bins + b] = start
        start += bins[b]
    for i in range(ids.shape[0]):
        row = ids[i]
        if row < 0:
            row += n_rows
        b = n_bins + (row >> shift)
        order[bins[b]] = i
        bins[b] += 1
    start = 0
    for b in range(n_bins):  # as the kernel leaves it: how many ids of each bin were taken
        bins[n_bins + b] -= start
        start += bins[b]


@njit(nogil=True, cache=True)
def rows_of_keys(ids, keys, rows):
    """Write the rows int64 ``[n]`` that ids name; return the last position of a bad id, or -1.

    ``keys`` int64 ``[3, K]`` has for each key the position behind its last id, the first row of its
    table and the rows of that.
    """
    bad, key = -1, 0
    for i in range(ids.shape[0]):
        while key < keys.shape[1] - 1 and keys[0, key] <= i:
            key += 1
        row, size = ids[i], keys[2, key]
        if row < 0 or row >= size:
            bad = i
            row = 0 if row < 0 or size == 0 else size - 1
        rows[i] = keys[1, key] + row
    return bad
