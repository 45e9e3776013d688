"""What the planner counts: sizes under many options at once, frequent values, Hamming distance."""

from __future__ import annotations

import numpy as np
from numba import njit

from .bits import popcount
from .compiling import call


@njit(nogil=True, cache=True)
def rank_of(masked, values, position):
    """Rank of a masked chunk among the values of a position, from 1, or 0."""
    for j in range(values.shape[1]):
        if masked == values[position, j]:
            return j + 1
    return 0


@njit(nogil=True, cache=True)
def words_by_option(rows, masks, values, row_words, totals):
    """Add up packed words for code_bits 1 to 3, not grouped and grouped, to ``totals[3, 2]``.

    ``values`` ``[positions, 7]`` are ordered by frequency, so the options differ only in how many
    of them have a code. A row that would not shrink counts `row_words`.
    """
    n, chunks = rows.shape
    uniform = masks.shape[0] == 1
    groups = (chunks + 31) >> 5
    payload = 0
    for i in range(chunks):
        payload += 8 * rows.itemsize - popcount(masks[0 if uniform else i])
    payload = (payload + 31) >> 5
    for r in range(n):
        miss1 = 0  # masked bits of chunks without a code, by code_bits
        miss2 = 0
        miss3 = 0
        stored = 0
        position = 0
        for group in range(groups):
            all_first = True
            for i in range(group * 32, min(group * 32 + 32, chunks)):
                if not uniform:
                    position = i
                mask = masks[position]
                rank = rank_of(rows[r, i] & mask, values, position)
                if rank != 1:
                    all_first = False
                    bits = popcount(mask)
                    miss1 += bits
                    if rank == 0 or rank > 3:
                        miss2 += bits
                        if rank == 0:
                            miss3 += bits
            if not all_first:
                stored += 1
        for k in range(1, 4):
            miss = miss1 if k == 1 else (miss2 if k == 2 else miss3)
            words = payload + ((miss + 31) >> 5)
            totals[k - 1, 0] += min(words + groups * k, row_words)
            totals[k - 1, 1] += min(words + ((groups + 31) >> 5) + stored * k, row_words)


@njit(nogil=True, cache=True)
def top_values_of(sorted_values, top):
    """Write the most frequent values of a sorted array to `top`, most frequent first.

    Equal counts go to the smaller value; places left over repeat the first value.
    """
    want = top.shape[0]
    counts = np.zeros(want, np.int64)
    n = sorted_values.shape[0]
    begin = 0
    while begin < n:
        end = begin + 1
        while end < n and sorted_values[end] == sorted_values[begin]:
            end += 1
        count = end - begin
        if count > counts[want - 1]:
            j = want - 1
            while j > 0 and counts[j - 1] < count:
                counts[j] = counts[j - 1]
                top[j] = top[j - 1]
                j -= 1
            counts[j] = count
            top[j] = sorted_values[begin]
        begin = end
    for j in range(1, want):
        if counts[j] == 0:
            top[j] = top[0]


def top_values_by_position(rows: np.ndarray, masks: np.ndarray, top: np.ndarray) -> None:
    """Fill ``top[i]`` with the most frequent masked chunks of position i.

    numpy sorts: Numba's sort takes a second to compile for each dtype, and is slower.
    """
    columns = np.ascontiguousarray((rows & masks).T)
    columns.sort(axis=1)
    call(top_values_of_each, columns, top)


@njit(nogil=True, cache=True)
def top_values_of_each(sorted_rows, top):
    """Fill ``top[i]`` with the most frequent values of row i, which is sorted."""
    for i in range(sorted_rows.shape[0]):
        top_values_of(sorted_rows[i], top[i])


@njit(nogil=True, cache=True)
def nearest_centers(rows, centers, nearest):
    """Write each row's nearest center in Hamming distance; return the sum of the distances."""
    total = 0
    for r in range(rows.shape[0]):
        best = np.int64(1) << 62
        for c in range(centers.shape[0]):
            distance = 0
            for i in range(rows.shape[1]):
                distance += popcount(rows[r, i] ^ centers[c, i])
            if distance < best:
                best = distance
                nearest[r] = c
        total += best
    return total
