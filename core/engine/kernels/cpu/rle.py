"""Numba twins of rle.cu: the value and the count of each run of equal units; see `kept_format`.

A unit begins a run when it differs from the one before, or its number is a multiple of RUN_UNITS.
``x`` and ``out`` are a tensor as unsigned integers ``[units]``, ``starts``, ``values`` and
``counts`` the parts of a `KeptLayout`; a count is one less than the run has units.
"""

from __future__ import annotations

import numpy as np

from ..kept_format import ROW_UNITS, RUN_UNITS
from .jit import njit


@njit(nogil=True, cache=True)
def count_rle(x, counts, begin, end):
    """Write how many runs each of the rows begin..end has."""
    for row in range(begin, end):
        count = np.int64(0)
        last = min(len(x), (row + 1) * ROW_UNITS)
        for first in range(row * ROW_UNITS, last, RUN_UNITS):
            count += 1
            for i in range(first + 1, min(last, first + RUN_UNITS)):
                count += x[i] != x[i - 1]
        counts[row] = count


@njit(nogil=True, cache=True)
def pack_rle(x, starts, values, counts, begin, end):
    """Write the runs of the rows begin..end."""
    # Written without a branch, one run too far: so not where another thread may write.
    heads = np.empty(ROW_UNITS + 1, np.int64)
    for row in range(begin, end):
        count = np.int64(0)
        last = min(len(x), (row + 1) * ROW_UNITS)
        for first in range(row * ROW_UNITS, last, RUN_UNITS):
            heads[count] = first
            count += 1
            for i in range(first + 1, min(last, first + RUN_UNITS)):
                heads[count] = i
                count += np.int64(x[i] != x[i - 1])
        heads[count] = last
        to = starts[row]
        # Another thread may have changed the row since it was counted.
        count = min(count, starts[row + 1] - to)
        for j in range(count):
            values[to + j] = x[heads[j]]
            counts[to + j] = heads[j + 1] - heads[j] - 1


@njit(nogil=True, cache=True)
def check_runs(starts, counts, units, begin, end):
    """Return one of the rows begin..end whose runs do not make up its units, or -1.

    Starts were checked.
    """
    bad = -1
    for row in range(begin, end):
        sum_of_runs = starts[row + 1] - starts[row]
        for j in range(starts[row], starts[row + 1]):
            sum_of_runs += np.int64(counts[j])
        if sum_of_runs != min(ROW_UNITS, units - row * ROW_UNITS):
            bad = row
    return bad


@njit(nogil=True, cache=True)
def decode_rle(starts, values, counts, out, begin, end):
    """Write the units of the rows begin..end, by starts and counts that were checked."""
    for row in range(begin, end):
        at = row * ROW_UNITS
        for j in range(starts[row], starts[row + 1]):
            end_of_run = at + np.int64(counts[j]) + 1
            value = values[j]
            for i in range(at, end_of_run):
                out[i] = value
            at = end_of_run
