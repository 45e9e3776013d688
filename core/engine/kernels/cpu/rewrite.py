"""Rows packed into their table, one after another; see `rewrites.rewrite_rows`."""

from __future__ import annotations

import numpy as np

from ..rewriting import FREE, LAUNCHES, REWRITTEN, USED, USED_BITS
from .bits import GROUP
from .jit import njit
from .rows import (
    copy_raw_row,
    measure_row,
    row_place,
    write_row,
)


@njit(nogil=True, cache=True)
def rewrite_rows(
    rows,
    raw,
    slots,
    leaving,
    coming,
    tables,
    starts,
    code_bits,
    grouped,
    uniform,
    row_words,
    keep_section,
    levels,
    words,
    bases,
    lengths,
    row_clusters,
    flags,
    moved,
    overflow,
    free,
    state,
    report,
):
    """Pack the row of each slot whose row leaves; arrays of no entries stand for None."""
    x = np.zeros(GROUP, rows.dtype)
    codes = np.empty(GROUP, rows.dtype)
    misses = np.empty((rows.shape[1] + 31) >> 5, np.uint64)
    in_place = flags.shape[0] > 0
    used = state[USED]
    # Places that become free are not taken again before the next batch.
    free_before = state[FREE]
    freed = np.empty(coming[0], np.uint32)
    n_freed = 0
    for k in range(coming[0]):
        row = leaving[k]
        if row < 0:
            continue
        state[REWRITTEN] += 1
        slot = slots[k]
        best, cluster = row_words, 0
        for c in range(tables.shape[0]):
            need = measure_row(
                rows[slot], tables[c], starts[c], code_bits, grouped, uniform, x, codes
            )
            if need < best:
                best, cluster = need, c
        if in_place:
            at, room = row * row_words, row_words - 1
        else:
            at, room = row_place(bases, lengths, row, row_words), np.int64(lengths[row])
        word, bit = row >> 5, np.uint32(1) << np.uint32(row & 31)
        outside = not in_place and moved[word] & bit != 0
        if best <= room:
            if outside:
                freed[n_freed] = words[at]
                n_freed += 1
                moved[word] &= ~bit
            if in_place:
                flags[word] |= bit
            if row_clusters.shape[0] > 0:
                row_clusters[row] = cluster
            table, start = tables[cluster], starts[cluster]
            write_row(
                rows[slot],
                table,
                start,
                code_bits,
                grouped,
                uniform,
                keep_section,
                levels,
                x,
                codes,
                misses,
                words,
                at,
                at + best,
            )
            continue
        if in_place:
            flags[word] &= ~bit
        elif room > 0:
            if not outside:
                if free_before > 0:
                    free_before -= 1
                    words[at] = free[free_before]
                else:
                    words[at] = used
                    used += 1
                moved[word] |= bit
            copy_raw_row(
                raw[slot], overflow.view(np.uint8), 4 * row_words * np.int64(words[at]), row_words
            )
            continue
        copy_raw_row(raw[slot], words.view(np.uint8), 4 * at, row_words)
    free[free_before : free_before + n_freed] = freed[:n_freed]
    state[USED], state[FREE] = used, free_before + n_freed
    state[LAUNCHES] += 1
    report[1] = state[REWRITTEN]
    report[0] = state[LAUNCHES] << USED_BITS | used
